"""The Z-Image adapter against diffusers' own `ZImagePipeline` on a tiny random checkpoint."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from PIL import Image
from torch import Tensor

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.embeds import pad_embeds
from flowfleet.models.families.z_image import ZImageAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import install_lora
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SQUARE = Size(64, 64)
LONG = "a sign that says everything there is to say about signs of all colors and of all shapes and sizes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("z_image", tmp_path_factory.mktemp("models") / "z_image")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> ZImageAdapter:
    return ZImageAdapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    return load_pipeline(checkpoint)


def load_pipeline(checkpoint: Path) -> Any:
    pipeline = ZImagePipeline.from_pretrained(str(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_idle(pipeline: Any, size: Size, steps: int, scale: float, **arguments: Any) -> Tensor:
    """Runs the pipeline with a transformer that answers `scale` times its input; returns the final latents."""
    forward = pipeline.transformer.forward
    pipeline.transformer.forward = lambda x, *_, **__: ([scale * one for one in x],)
    latents: Tensor = pipeline(
        list(RAGGED),
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        guidance_scale=0.0,
        output_type="latent",
        **arguments,
    ).images
    pipeline.transformer.forward = forward
    return latents


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [SQUARE, Size(32, 96), Size(112, 48)])
def test_sampling_equals_the_pipeline(adapter: ZImageAdapter, pipeline: Any, size: Size, scale: float) -> None:
    prompts = [*RAGGED[:2], LONG]  # the last one fills two blocks of 32 tokens, the others one
    arguments: dict[str, Any] = {"height": size.height, "width": size.width, "num_inference_steps": 4}
    arguments["guidance_scale"] = scale - 1
    negative = adapter.encode(["a gray blur"])
    latents = sample_ode(adapter, adapter.encode(prompts), size, 4, Guidance(scale), negative)
    for output_type in "latent", "np":  # The pipeline writes into its list of prompts.
        texts: dict[str, Any] = {"prompt": list(prompts), "negative_prompt": ["a gray blur"] * 3}
        expected = pipeline(generator=generators(), output_type=output_type, **texts, **arguments).images
        if output_type == "latent":
            torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
        else:
            parity.assert_same_pictures(adapter.decode(latents, size), expected)


def test_guidance_of_the_pipeline_is_one_more_here_and_nothing_else(adapter: ZImageAdapter) -> None:
    """p + g (p - n) = n + (g + 1)(p - n), if the pipeline's other switches are off, as by its defaults."""
    parameters = inspect.signature(ZImagePipeline.__call__).parameters
    assert parameters["cfg_normalization"].default is False
    assert parameters["cfg_truncation"].default == 1.0  # its time never exceeds 1
    prompts, negative = adapter.encode(RAGGED), adapter.encode([""])
    latents, timestep = adapter.initial_latents(SEEDS, SQUARE), torch.tensor(500.0)
    with torch.no_grad():
        p, n = (adapter.velocity(latents, timestep, which, size=SQUARE) for which in (prompts, negative))
        guided = adapter.velocity(
            latents, timestep, prompts, size=SQUARE, guidance=Guidance(5.0 + 1), negative=negative
        )
    torch.testing.assert_close(guided, p + 5.0 * (p - n), rtol=1e-5, atol=1e-5)
    assert (guided - p).abs().max() > 1e-2


@pytest.mark.parametrize(("size", "steps"), [(SQUARE, 1), (Size(512, 512), 8), (Size(32, 256), 49)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_schedule_is_the_pipelines_bit_for_bit(
    checkpoint: Path, tmp_path: Path, size: Size, steps: int, dynamic: bool
) -> None:
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    config = copied / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dynamic_shifting": dynamic}))
    pipeline, adapter = load_pipeline(copied), ZImageAdapter.load(copied, dtype=torch.float32, components=())
    run_idle(pipeline, size, steps, 1.0)
    schedule = adapter.schedule(steps, size)
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)
    assert schedule.num_steps == steps


@pytest.mark.parametrize("size", [SQUARE, Size(48, 112)])
def test_sampling_starts_where_the_pipeline_does(adapter: ZImageAdapter, pipeline: Any, size: Size) -> None:
    latents = adapter.initial_latents(SEEDS, size)
    assert latents.shape == (3, 16, size.height // 8, size.width // 8)
    assert torch.equal(latents, run_idle(pipeline, size, 1, 0.0, generator=generators()))


def test_encoding_equals_the_pipelines(adapter: ZImageAdapter, pipeline: Any) -> None:
    encoded = adapter.encode(RAGGED)
    with torch.no_grad():
        captions, _ = pipeline.encode_prompt(list(RAGGED), do_classifier_free_guidance=False)
    for row, caption in enumerate(captions):
        assert torch.equal(encoded.embeds[row][encoded.mask[row]], caption)
        assert not encoded.embeds[row][~encoded.mask[row]].any()
    around = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    lengths = [len(pipeline.tokenizer(around.format(prompt)).input_ids) for prompt in RAGGED]
    assert encoded.mask.sum(1).tolist() == lengths
    assert encoded.has_padding
    assert not adapter.encode(["a"]).has_padding
    assert adapter.encode(["word " * 600]).embeds.shape[1] == 512


def test_prompts_make_a_difference_and_padding_none(adapter: ZImageAdapter) -> None:
    prompts, latents = adapter.encode(RAGGED[:2]), adapter.initial_latents(SEEDS[:1] * 2, SQUARE)
    with torch.no_grad():
        tight, wide = (
            adapter.velocity(latents, torch.tensor(500.0), which, size=SQUARE)
            for which in (prompts, pad_embeds(prompts, 70))
        )
    assert torch.equal(tight, wide)
    assert (tight[0] - tight[1]).abs().mean() > 1e-2 * tight.std()


def test_rows_do_not_depend_on_their_batch(adapter: ZImageAdapter) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, Size(64, 32), [900.0, 20.0, 500.0])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_gradients_flow(adapter: ZImageAdapter, scale: float) -> None:
    parity.assert_gradients_flow(adapter, SQUARE, Guidance(scale))


def test_media_are_encoded_as_by_the_vae(adapter: ZImageAdapter, pipeline: Any) -> None:
    parity.assert_media_are_encoded_as_by_the_vae(adapter, pipeline.vae, Size(32, 64), lambda planes: planes)


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: ZImageAdapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, ZImageAdapter)
    parity.assert_trains_alone(trainer, adapter, Size(64, 96))


def test_lora_reaches_every_block(checkpoint: Path) -> None:
    trainer = ZImageAdapter.load(checkpoint, dtype=torch.float32, components=("transformer",))
    names = install_lora(trainer.experts, LoraSpec(rank=2, alpha=4, target_modules=list(trainer.lora_targets)))
    for block in "noise_refiner.0", "context_refiner.0", "layers.0", "layers.1":
        for target in ZImageAdapter.lora_targets:
            assert any(f".{block}." in name and f".{target}.lora_A" in name for name in names)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    parity.assert_computes_in(ZImageAdapter.load(checkpoint, dtype=torch.bfloat16), torch.bfloat16, SQUARE)


def test_loading_writes_nothing_to_the_terminal(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ZImageAdapter.load(checkpoint, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_wrong_sizes_and_inputs_are_refused(adapter: ZImageAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match="no condition images"):
        adapter.encode(["a"], images=[[Image.new("RGB", (8, 8))]])
    with pytest.raises(ValueError, match="needs negative"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(2.0))
