"""BAGEL as a flow: its schedule, guidance, prompts and folder, and that rollout and trainer agree.

Its transformer is held to vLLM-Omni's in tests/services/rollout/test_vllm_omni_bagel.py.
"""

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from flowfleet.algorithms.registry import LOSSES
from flowfleet.conformance.models import RAGGED, SEEDS, sample_ode
from flowfleet.job.rules.sequences import refusal
from flowfleet.models.base import ModelAdapter
from flowfleet.models.families.bagel.checkpoint import read_config
from flowfleet.models.families.bagel.painter import BagelPainter, guide
from flowfleet.models.families.bagel.transformer import grid_waves
from flowfleet.models.registry import adapter_for, family_of, sequence_adapter_for
from flowfleet.models.settings import Guidance, Renorm, Size
from recipes.tiny_unified.bagel import LATENT_SIDE
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SIZE = Size(32, 48)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("bagel", tmp_path_factory.mktemp("models") / "bagel")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> ModelAdapter:
    return adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


def test_one_folder_is_a_flow_and_a_model_that_writes(checkpoint: Path) -> None:
    family = family_of(checkpoint)
    assert family.title == "BAGEL"
    assert [refusal(family, LOSSES[name]) for name in ("flow_grpo", "dpo", "gspo")] == ["", "", ""]
    assert adapter_for(checkpoint) is BagelPainter
    assert sequence_adapter_for(checkpoint).__name__ == "BagelWriter"


@pytest.mark.parametrize("points", [2, 15, 50])
def test_the_levels_are_shifted_by_three_and_fifteen_of_them_are_fourteen_steps(
    adapter: ModelAdapter, points: int
) -> None:
    even = torch.linspace(1, 0, points, dtype=torch.float64)
    expected = 3 * even / (1 + 2 * even)
    schedule = adapter.schedule(points - 1, SIZE)
    assert schedule.num_steps == points - 1
    torch.testing.assert_close(schedule.sigmas.double(), expected, rtol=0, atol=5e-7)
    torch.testing.assert_close(schedule.timesteps.double(), 1000 * expected[:-1], rtol=0, atol=5e-4)
    own = adapter.schedule(points - 1, SIZE, shift=1.0)
    torch.testing.assert_close(own.sigmas.double(), even, rtol=0, atol=5e-7)


@pytest.mark.parametrize("renorm", [None, "global", "channel", "text_channel"])
@pytest.mark.parametrize("image_scale", [1.0, 1.5])
def test_guidance_is_that_of_three_branches_where_no_picture_is_given(
    renorm: Renorm | None, image_scale: float
) -> None:
    """The authors' formula in float64, a row at a time, with a third branch that equals the first."""
    torch.manual_seed(0)
    positive, negative = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    found = guide(positive, negative, Guidance(4.0, image_scale=image_scale, renorm=renorm))
    for row, (own, text, image) in enumerate(zip(positive, negative, positive, strict=True)):
        guided = text + 4.0 * (own - text)
        if renorm == "text_channel":
            guided = guided * (own.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)).clamp(max=1)
        guided = image + image_scale * (guided - image)
        if renorm == "channel":
            guided = guided * (own.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)).clamp(max=1)
        if renorm in (None, "global"):
            guided = guided * (own.norm() / guided.norm()).clamp(max=1)
        torch.testing.assert_close(found[row], guided, rtol=1e-7, atol=1e-9)


def test_guidance_is_off_outside_its_interval(adapter: ModelAdapter) -> None:
    """Above the lower end and up to the upper one, row by row."""
    prompts, negative = adapter.encode(RAGGED), adapter.encode([" "])
    latents = adapter.initial_latents(SEEDS, SIZE)

    def velocity(timestep: torch.Tensor, guidance: Guidance) -> torch.Tensor:
        with torch.no_grad():
            return adapter.velocity(latents, timestep, prompts, size=SIZE, guidance=guidance, negative=negative)

    inside = Guidance(4.0, interval=(0.4, 1.0))
    levels = torch.tensor([1000.0, 400.0, 401.0])
    found, guided, plain = velocity(levels, inside), velocity(levels, Guidance(4.0)), velocity(levels, Guidance())
    assert torch.equal(found[[0, 2]], guided[[0, 2]])
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(guided[1], plain[1])
    low = torch.tensor(100.0)
    assert torch.equal(velocity(low, inside), velocity(low, Guidance()))


def test_rows_do_not_depend_on_their_batch_with_guidance_either(adapter: ModelAdapter) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, SIZE, [900.0, 50.0, 300.0])
    prompts, negative = adapter.encode(RAGGED), adapter.encode([""])
    latents = adapter.initial_latents(SEEDS, SIZE)
    guidance = Guidance(4.0, image_scale=1.5)
    level = torch.tensor(700.0)
    with torch.no_grad():
        together = adapter.velocity(latents, level, prompts, size=SIZE, guidance=guidance, negative=negative)
        for row, text in enumerate(RAGGED):
            alone = adapter.velocity(
                latents[row : row + 1],
                level,
                adapter.encode([text]),
                size=SIZE,
                guidance=guidance,
                negative=negative,
            )
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)  # guidance multiplies by up to 5.5


def test_prompts_are_token_ids_and_a_blank_one_has_none(adapter: ModelAdapter) -> None:
    tokenizer = adapter.pipeline.tokenizer
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    prompts = adapter.encode(["a red ball", " "])
    expected = [start, *tokenizer("a red ball")["input_ids"], end]
    assert prompts.embeds[0, prompts.mask[0], 0].tolist() == expected
    assert not prompts.mask[1].any()
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, SIZE)


def test_gradients_flow(adapter: ModelAdapter) -> None:
    """Into the layers; what only looks at pictures or writes has none."""
    prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, SIZE)
    with torch.no_grad():
        frozen = adapter.velocity(latents, torch.tensor(700.0), prompts, size=SIZE)
    adapter.transformer.requires_grad_(True)
    trained = adapter.velocity(latents, torch.tensor(700.0), prompts, size=SIZE)
    assert torch.equal(trained.detach(), frozen)
    trained.square().sum().backward()  # type: ignore[no-untyped-call]
    idle = {name for name, parameter in adapter.transformer.named_parameters() if parameter.grad is None}
    adapter.transformer.requires_grad_(False).zero_grad()
    last = f"language_model.model.layers.{adapter.transformer.config.num_layers - 1}."
    parts = ("vit_model.", "connector.", "language_model.lm_head.", "language_model.model.norm.weight")
    text_only = ("mlp.", "post_attention_layernorm.weight", "self_attn.o_proj.weight")
    assert all(name.startswith(parts) or name.removeprefix(last).startswith(text_only) for name in idle), idle
    assert any(name.startswith("vit_model.") for name in idle)


def test_the_ratio_is_exactly_one(adapter: ModelAdapter, checkpoint: Path) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)
    parity_of = Guidance(4.0, interval=(0.4, 1.0), image_scale=1.5)
    schedule, prompts, negative = trainer.schedule(6, SIZE), adapter.encode(RAGGED), adapter.encode([" "])
    from flowfleet.algorithms.sde import reverse_step

    latents = adapter.initial_latents(SEEDS, SIZE)
    for i in range(3):
        sigmas = schedule.sigmas[i : i + 2]
        with torch.no_grad():
            velocity = adapter.velocity(
                latents, schedule.timesteps[i], prompts, size=SIZE, guidance=parity_of, negative=negative
            )
            noise = adapter.step_noise(SEEDS, i, latents.shape[1:])
            rollout = reverse_step("sde")(
                latents, velocity, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, noise=noise
            )
        trainer.transformer.requires_grad_(True)
        again = trainer.velocity(
            latents, schedule.timesteps[i], prompts, size=SIZE, guidance=parity_of, negative=negative
        )
        trained = reverse_step("sde")(
            latents, again, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, prev_sample=rollout.prev_sample
        )
        assert torch.equal((trained.log_prob - rollout.log_prob).exp().detach(), torch.ones(3))
        latents = rollout.prev_sample


def test_media_are_encoded_as_by_the_vae(adapter: ModelAdapter) -> None:
    """In the authors' order: rows and columns of a token's latent pixels, then channels."""

    def packed(planes: torch.Tensor) -> torch.Tensor:
        rows, columns = planes.shape[2] // 2, planes.shape[3] // 2
        parts = planes.reshape(len(planes), -1, rows, 2, columns, 2)
        return torch.einsum("nchpwq->nhwpqc", parts).reshape(len(planes), rows * columns, -1)

    parity.assert_media_are_encoded_as_by_the_vae(adapter, adapter.vae, SIZE, packed)


def test_the_vae_has_the_weights_of_its_file(adapter: ModelAdapter, checkpoint: Path) -> None:
    """A level of the decoder is counted from the other end in the authors' names."""
    stored, vae = load_file(checkpoint / "ae.safetensors"), adapter.vae
    assert isinstance(vae, AutoencoderKL)
    assert torch.equal(
        vae.encoder.down_blocks[1].resnets[0].conv1.weight, stored["encoder.down.1.block.0.conv1.weight"]
    )
    assert torch.equal(vae.decoder.up_blocks[0].resnets[1].conv2.bias, stored["decoder.up.3.block.1.conv2.bias"])
    query = stored["decoder.mid.attn_1.q.weight"][:, :, 0, 0]
    assert torch.equal(vae.decoder.mid_block.attentions[0].to_q.weight, query)


def test_it_trains_alone(adapter: ModelAdapter, checkpoint: Path) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    parity.assert_trains_alone(trainer, adapter, SIZE)


def test_it_computes_in_bfloat16(checkpoint: Path) -> None:
    """Token ids stay exact."""
    adapter = adapter_for(checkpoint).load(checkpoint, dtype=torch.bfloat16)
    assert adapter.encode(["a"]).embeds.dtype == torch.float32
    latents = sample_ode(adapter, adapter.encode(RAGGED), SIZE, 2)
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()


def test_wrong_sizes_are_refused(adapter: ModelAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match=f"at most {16 * LATENT_SIDE} pixels"):
        adapter.latent_shape(Size(16 * LATENT_SIDE + 16, 16))
    with pytest.raises(ValueError, match="at least 1"):
        adapter.schedule(0, SIZE)


def test_lora_adapts_the_painting_expert_alone(checkpoint: Path) -> None:
    from flowfleet.proto.rollout_pb2 import LoraSpec
    from flowfleet.weights.lora import install_lora

    adapter = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    names = install_lora(adapter.experts, LoraSpec(rank=2, alpha=4, target_modules=list(adapter.lora_targets)))
    modules = {name.partition(".lora_")[0] for name in names}
    assert len(modules) == adapter.transformer.config.num_layers * len(adapter.lora_targets)
    assert all("_moe_gen" in name for name in modules)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("llm_config.json", "no readable llm_config.json"),
        ("vit_config.json", "no readable vit_config.json"),
        ("ema.safetensors", r"has no weights: ema\.safetensors is not there"),
        ("ae.safetensors", "cannot be read as the weights of FLUX's VAE"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, file: str, message: str) -> None:
    path = make_tiny("bagel", tmp_path / "bagel")
    (path / file).unlink()
    with pytest.raises(ValueError, match=message):
        adapter_for(path).load(path, dtype=torch.float32)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    path = make_tiny("bagel", tmp_path / "bagel")
    state = load_file(path / "ema.safetensors")
    del state["vae2llm.bias"]
    save_file(state, path / "ema.safetensors")
    with pytest.raises(ValueError, match=r"no weights for 1 of \d+ tensors, the first is vae2llm\.bias"):
        adapter_for(path).load(path, dtype=torch.float32)


def test_the_table_of_positions_decides_how_large_pictures_may_be(tmp_path: Path) -> None:
    """Also where `config.json` names a smaller one, and where an index names the files."""
    path = make_tiny("bagel", tmp_path / "bagel")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_latent_size": 4}))
    assert read_config(path).latent_side == LATENT_SIDE
    state = load_file(path / "ema.safetensors")
    (path / "ema.safetensors").rename(path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_config(path).latent_side == LATENT_SIDE
    adapter_for(path).load(path, dtype=torch.float32, components=("transformer",))


def test_the_table_of_positions_has_columns_before_rows() -> None:
    table = grid_waves(5, 16).reshape(5, 5, 16)
    frequencies = torch.tensor([10_000 ** (-k / 4) for k in range(4)], dtype=torch.float64)
    for row, column in (0, 3), (4, 1):
        expected = [
            angle for place in (column, row) for angle in ((place * frequencies).sin(), (place * frequencies).cos())
        ]
        torch.testing.assert_close(table[row, column].double(), torch.cat(expected), rtol=0, atol=1e-6)
