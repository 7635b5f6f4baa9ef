"""The Qwen-Image adapter against diffusers' own `QwenImagePipeline` on a tiny random checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from flowfleet.algorithms.registry import STEPS
from flowfleet.algorithms.sde import ode_step
from flowfleet.models.embeds import PromptEmbeds, pad_embeds
from flowfleet.models.families.qwen_image import QwenImageAdapter, guide
from flowfleet.models.packing import pack, unpack
from flowfleet.models.settings import Guidance, Size
from tests.flowfleet.models import parity

RAGGED = ['A red sign that says "K7QX"', "a", "a green blue white sign that says nothing at all"]
SEEDS = [11, 2**62, 5]


@pytest.fixture(scope="module")
def adapter(tiny_qwen_image: Path) -> QwenImageAdapter:
    return QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(tiny_qwen_image: Path) -> Any:
    pipeline = QwenImagePipeline.from_pretrained(str(tiny_qwen_image))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in SEEDS]


@torch.no_grad()
def sample_ode(
    adapter: QwenImageAdapter, prompts: PromptEmbeds, size: tuple[int, int], steps: int, scale: float
) -> Tensor:
    drawn = Size(*size)
    schedule, negative = adapter.schedule(steps, drawn), adapter.encode([" "])
    latents = adapter.initial_latents(SEEDS, drawn)
    for i in range(steps):
        velocity = adapter.velocity(
            latents,
            schedule.timesteps[i],
            prompts,
            size=drawn,
            guidance=Guidance(scale),
            negative=negative,
        )
        latents = ode_step(latents, velocity, schedule.sigmas[i], schedule.sigmas[i + 1])
    return latents


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [(64, 64), (32, 96), (112, 48)])
def test_sampling_equals_the_pipeline(
    adapter: QwenImageAdapter, pipeline: Any, size: tuple[int, int], scale: float
) -> None:
    arguments: dict[str, Any] = {"height": size[0], "width": size[1], "num_inference_steps": 4, "true_cfg_scale": scale}
    if scale > 1:
        arguments["negative_prompt"] = [" "] * len(RAGGED)
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **arguments).images
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 4, scale)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    pictures = pipeline(RAGGED, generator=generators(), output_type="np", **arguments).images
    levels = np.abs(
        adapter.decode(latents, Size(*size))[:, 0].numpy().astype(int) - (pictures * 255).round().astype(int)
    )
    assert levels.max() <= 1
    assert (levels > 0).mean() < 1e-3  # where a value lies on the edge between two levels


@pytest.mark.parametrize(("size", "steps"), [((64, 64), 6), ((512, 512), 10), ((32, 256), 28)])
def test_schedule_is_the_pipelines_bit_for_bit(
    adapter: QwenImageAdapter, pipeline: Any, size: tuple[int, int], steps: int
) -> None:
    pipeline.transformer.forward, forward = lambda hidden_states, **_: (hidden_states,), pipeline.transformer.forward
    pipeline("a", height=size[0], width=size[1], num_inference_steps=steps, true_cfg_scale=1.0, output_type="latent")
    pipeline.transformer.forward = forward
    schedule = adapter.schedule(steps, Size(*size))
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)


def test_padding_to_a_width_changes_nothing_but_rounding(adapter: QwenImageAdapter) -> None:
    tight, wide = adapter.encode(RAGGED), pad_embeds(adapter.encode(RAGGED), 40)
    assert wide.embeds.shape[1] == 40
    assert wide.mask.sum(1).tolist() == tight.mask.sum(1).tolist()
    torch.testing.assert_close(
        sample_ode(adapter, wide, (64, 64), 3, 1.0), sample_ode(adapter, tight, (64, 64), 3, 1.0), rtol=0, atol=1e-5
    )


def test_encoding_equals_the_pipelines_and_drops_the_template(adapter: QwenImageAdapter, pipeline: Any) -> None:
    encoded = adapter.encode(RAGGED)
    embeds, mask = pipeline.encode_prompt(RAGGED)
    assert torch.equal(encoded.embeds, embeds)
    assert torch.equal(encoded.mask, mask.bool())
    tail = len(pipeline.tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    lengths = [len(pipeline.tokenizer(prompt).input_ids) + tail for prompt in RAGGED]
    assert encoded.mask.sum(1).tolist() == lengths
    assert not adapter.encode(["a"]).has_padding
    with pytest.raises(ValueError, match="at least one prompt"):
        adapter.encode([])


@pytest.mark.parametrize("name", sorted(STEPS))
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_trainers_ratio_is_exactly_one_on_the_same_batch(
    adapter: QwenImageAdapter, name: str, scale: float
) -> None:
    parity.assert_ratio_is_exactly_one(adapter, Size(64, 96), name, Guidance(scale))


def test_timesteps_may_differ_by_row(adapter: QwenImageAdapter) -> None:
    schedule, prompts = adapter.schedule(6, Size(64, 64)), adapter.encode(RAGGED)
    latents = adapter.initial_latents(SEEDS, Size(64, 64))
    rows = [4, 0, 2]

    def velocity(timestep: Tensor) -> Tensor:
        with torch.no_grad():
            return adapter.velocity(latents, timestep, prompts, size=Size(64, 64))

    together = velocity(schedule.timesteps[rows])
    for row, i in enumerate(rows):
        torch.testing.assert_close(together[row], velocity(schedule.timesteps[i])[row], rtol=0, atol=1e-6)


def test_encoding_media_undoes_decoding_up_to_the_vae(adapter: QwenImageAdapter, pipeline: Any) -> None:
    frames = torch.randint(256, (2, 1, 32, 48, 3), dtype=torch.uint8)
    latents = adapter.encode_media(frames, Size(32, 48))
    assert latents.shape == (2, *adapter.latent_shape(Size(32, 48)))
    pixels = frames.permute(0, 4, 1, 2, 3) / 127.5 - 1
    config = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        expected = (pipeline.vae.encode(pixels).latent_dist.mode() - mean) / std
    torch.testing.assert_close(unpack(latents, 2, 3), expected[:, :, 0], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="media must be uint8"):
        adapter.encode_media(frames, Size(48, 32))


def test_noise_of_a_sample_does_not_depend_on_its_batch(adapter: QwenImageAdapter) -> None:
    shape = adapter.latent_shape(Size(64, 96))
    together = adapter.initial_latents(SEEDS, Size(64, 96)), adapter.step_noise(SEEDS, 2, shape)
    assert together[0].shape == together[1].shape == (3, *shape) == (3, 24, 64)
    for row, seed in enumerate(SEEDS):
        assert torch.equal(adapter.initial_latents([seed], Size(64, 96))[0], together[0][row])
        assert torch.equal(adapter.step_noise([seed], 2, shape)[0], together[1][row])
    assert not torch.equal(adapter.step_noise(SEEDS, 3, shape), together[1])
    assert not torch.equal(adapter.step_noise(SEEDS, 0, shape), together[0])


def test_packing_is_the_pipelines() -> None:
    planes = torch.randn(2, 16, 6, 10)
    tokens = pack(planes)
    assert torch.equal(tokens, QwenImagePipeline._pack_latents(planes, 2, 16, 6, 10))
    assert torch.equal(unpack(tokens, 3, 5), planes)


def test_guidance_matches_the_formula() -> None:
    positive, negative = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()
    combined = (negative + 4 * (positive - negative)).numpy()
    norms = np.sqrt((positive.numpy() ** 2).sum(-1, keepdims=True)), np.sqrt((combined**2).sum(-1, keepdims=True))
    np.testing.assert_allclose(guide(positive, negative, 4.0), combined * norms[0] / norms[1], rtol=1e-12)
    assert torch.equal(guide(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), 2.0), torch.zeros(1, 2, 3))


def test_guidance_needs_negative_embeds_that_fit(adapter: QwenImageAdapter) -> None:
    latents, timestep = adapter.initial_latents(SEEDS, Size(64, 64)), torch.tensor(500.0)
    arguments: dict[str, Any] = {"size": Size(64, 64), "guidance": Guidance(2.0)}
    with pytest.raises(ValueError, match="needs negative"):
        adapter.velocity(latents, timestep, adapter.encode(RAGGED), **arguments)
    with pytest.raises(ValueError, match="1 or 3 rows"):
        adapter.velocity(latents, timestep, adapter.encode(RAGGED[:2]), **arguments)


def test_a_trainer_loads_the_transformer_alone(tiny_qwen_image: Path) -> None:
    trainer = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.bfloat16, components=("transformer",))
    assert trainer.text_encoder is None
    assert trainer.vae is None
    assert {parameter.dtype for parameter in trainer.transformer.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in trainer.transformer.parameters())
    assert trainer.schedule(6, Size(64, 64)).num_steps == 6
    latents = trainer.initial_latents([1], Size(64, 64))
    prompts = PromptEmbeds(torch.randn(1, 4, 32).bfloat16(), torch.ones(1, 4, dtype=torch.bool))
    velocity = trainer.velocity(latents, torch.tensor(900.0), prompts, size=Size(64, 64))
    assert velocity.dtype == torch.float32
    with pytest.raises(ValueError, match="component vae"):
        trainer.decode(latents, Size(64, 64))
    with pytest.raises(ValueError, match="component text_encoder"):
        trainer.encode(["a"])


@pytest.mark.parametrize("size", [(60, 64), (64, 8), (0, 64), (-16, 64)])
def test_sizes_that_do_not_fit_the_grid_are_refused(adapter: QwenImageAdapter, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        adapter.initial_latents([1], Size(*size))


def test_a_video_is_refused(adapter: QwenImageAdapter) -> None:
    with pytest.raises(ValueError, match="one picture, not 5 frames"):
        adapter.latent_shape(Size(64, 64, 5))


def test_loading_writes_nothing_to_the_terminal(tiny_qwen_image: Path, capfd: pytest.CaptureFixture[str]) -> None:
    QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_broken_checkpoints_are_refused(tiny_qwen_image: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown components"):
        QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32, components=("unet",))  # type: ignore[arg-type]
    broken = shutil.copytree(tiny_qwen_image, tmp_path / "no-weights")
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="cannot be loaded as a QwenImagePipeline"):
        QwenImageAdapter.load(broken, dtype=torch.float32, components=("transformer",))
    weights.unlink()
    with pytest.raises(ValueError, match="cannot be loaded as a QwenImagePipeline"):
        QwenImageAdapter.load(broken, dtype=torch.float32, components=("transformer",))
    shutil.rmtree(broken / "vae")
    with pytest.raises(ValueError, match="no configuration of its vae"):
        QwenImageAdapter.load(broken, dtype=torch.float32, components=("transformer",))


def test_lora_targets_name_modules_of_every_block(adapter: QwenImageAdapter) -> None:
    names = [name for name, _ in adapter.transformer.named_modules()]
    for target in adapter.lora_targets:
        assert sum(name.endswith(f".{target}") for name in names) == len(adapter.transformer.transformer_blocks)
