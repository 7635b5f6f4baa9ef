"""Families that draw pictures, each held to diffusers' own pipeline on a tiny random checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flowfleet.conformance.models import RAGGED, SEEDS, check_model, first_order, generators, sample_ode
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import install_lora
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

STEPS = 3
NEGATIVE = "a mess"


@dataclass(frozen=True)
class Family:
    """Differences between pipelines, as far as these tests are concerned."""

    guided: Callable[[float], dict[str, Any]]
    """The pipeline's arguments for our guidance scale."""
    negative: str = NEGATIVE
    """Negative prompt that the pipeline has."""
    multiple: int = 16
    """Pixels that sides are multiples of."""
    fixed: Callable[[Size], dict[str, Any]] = lambda size: {}
    """Further arguments of the pipeline."""
    num_images: int = 0
    """Condition images that are tried."""
    is_euler: bool = True
    """The checkpoint's scheduler makes first-order steps."""


def by_negative(name: str = "guidance_scale", shift: float = 0.0) -> Callable[[float], dict[str, Any]]:
    return lambda scale: {name: scale - shift, "negative_prompt": [NEGATIVE]}


FAMILIES = {
    "flux2_klein": Family(lambda scale: {"guidance_scale": scale}, negative="", num_images=2),
    "sana": Family(by_negative(), multiple=32, fixed=lambda size: {"use_resolution_binning": False}, is_euler=False),
    "krea2": Family(by_negative(shift=1.0)),
    "qwen_image_21": Family(by_negative("true_cfg_scale"), multiple=32),
    "flux_kontext": Family(
        by_negative("true_cfg_scale"),
        fixed=lambda size: {"max_area": size.height * size.width, "_auto_resize": False},
        num_images=1,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(kind: str) -> Family:
    return FAMILIES[kind]


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(kind, tmp_path_factory.mktemp("models") / kind)


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> ModelAdapter:
    return adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path, adapter: ModelAdapter) -> Any:
    pipeline_class: Any = adapter.pipeline_class
    pipeline = pipeline_class.from_pretrained(str(checkpoint), **dict.fromkeys(adapter.own_parts))
    adapter.complete(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def size(family: Family) -> Size:
    return Size(2 * family.multiple, 4 * family.multiple)


def pictures(count: int) -> list[Image.Image]:
    noise = np.random.default_rng(3).integers(0, 256, (count, 64, 96, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def run(pipeline: Any, family: Family, size: Size, scale: float = 1.0, **arguments: Any) -> tuple[Tensor, Any]:
    """The pipeline's final latents as it denoises them, and its pictures."""
    kept: dict[str, Tensor] = {}

    def keep(_: object, step: int, timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept.update(tensors)
        return {}

    given: dict[str, Any] = {"height": size.height, "width": size.width, "num_inference_steps": STEPS}
    given |= {"output_type": "np", "callback_on_step_end": keep} | family.guided(scale) | family.fixed(size) | arguments
    latents, drawn = [], []
    for prompt, generator in zip(RAGGED, generators(), strict=True):  # a row is to be what it is alone
        drawn.append(pipeline(prompt=[prompt], generator=[generator], **given).images)
        latents.append(kept["latents"])
    return torch.cat(latents), np.concatenate(drawn) if given["output_type"] == "np" else drawn


def on_white(drawn: Any) -> Any:
    """Pictures without their opacity, if they have that."""
    return drawn[..., :3] * drawn[..., 3:] + 1 - drawn[..., 3:] if drawn.shape[-1] == 4 else drawn


def encoded(adapter: ModelAdapter, shown: list[Image.Image]) -> PromptEmbeds:
    return adapter.encode(RAGGED, images=[shown] * len(RAGGED) if shown else None)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("has_images", [False, True])
def test_samples_equal_the_pipelines(
    adapter: ModelAdapter, pipeline: Any, family: Family, size: Size, scale: float, has_images: bool
) -> None:
    if has_images and not family.num_images:
        return
    shown = pictures(family.num_images) if has_images else []
    if shown:
        adapter.resize_conditions(64 * 96)
    if not family.is_euler:
        pipeline.scheduler = first_order(adapter.schedule(STEPS, size))
    given = {"image": shown if len(shown) > 1 else shown[0]} if shown else {}
    expected, drawn = run(pipeline, family, size, scale, **given)
    texts = [family.negative] * len(RAGGED)
    negative = adapter.encode_negative(texts, images=[shown] * len(RAGGED) if shown else None)
    latents = sample_ode(adapter, encoded(adapter, shown), size, STEPS, Guidance(scale), negative)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    parity.assert_same_pictures(adapter.decode(latents, size), on_white(drawn))


def test_start_and_schedule_are_the_pipelines(
    adapter: ModelAdapter, pipeline: Any, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Size(16 * family.multiple, 8 * family.multiple)
    idle = lambda hidden_states, *_, **__: (0 * hidden_states,)  # noqa: E731
    monkeypatch.setattr(pipeline.transformer, "forward", idle)
    latents, _ = run(pipeline, family, size, num_inference_steps=10, output_type="latent")
    assert torch.equal(adapter.initial_latents(SEEDS, size), latents)
    if family.is_euler:
        schedule = adapter.schedule(10, size)
        assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
        assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)


def test_rows_prompts_and_gradients(adapter: ModelAdapter, size: Size) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, size, [900.0, 20.0, 500.0])
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, size)
    parity.assert_gradients_flow(adapter, size, Guidance(4.0))


def test_media_are_encoded_as_by_the_vae(adapter: ModelAdapter, pipeline: Any, size: Size) -> None:
    """Latents are checked by samples and condition images; here decoding them undoes what encoding did."""
    frames = torch.randint(0, 256, (2, 1, size.height, size.width, 3), dtype=torch.uint8)
    pixels, vae = frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1, pipeline.vae
    if vae.config.get("in_channels") == 4:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
    is_film = "temperal_downsample" in vae.config
    with torch.no_grad():
        found = vae.encode(pixels if is_film else pixels[:, :, 0])
        again = vae.decode(found.latent if hasattr(found, "latent") else found.latent_dist.mode()).sample
    drawn = ((again[:, :, 0] if is_film else again) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    latents = adapter.encode_media(frames, size)
    assert latents.shape == (2, *adapter.latent_shape(size))
    parity.assert_same_pictures(adapter.decode(latents, size), on_white(drawn))


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: ModelAdapter, size: Size) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    parity.assert_trains_alone(trainer, adapter, size)
    names = install_lora(trainer.experts, LoraSpec(rank=2, alpha=4, target_modules=list(trainer.lora_targets)))
    assert all(any(f".{target}.lora_A" in name for name in names) for target in trainer.lora_targets)
    for block, module in trainer.transformer.named_children():
        if isinstance(module, nn.ModuleList):
            assert all(any(f".{block}.{i}." in name for name in names) for i in range(len(module)))


def test_computes_in_bfloat16(checkpoint: Path, size: Size) -> None:
    parity.assert_computes_in(adapter_for(checkpoint).load(checkpoint, dtype=torch.bfloat16), torch.bfloat16, size)


def test_wrong_sizes_are_refused(adapter: ModelAdapter, family: Family) -> None:
    for height, width in (60, 64), (64, 8), (0, 64), (-64, 64):
        with pytest.raises(ValueError, match=f"multiples of {family.multiple}"):
            adapter.initial_latents([1], Size(height, width))
    with pytest.raises(ValueError, match="leave num_frames at 1"):
        adapter.latent_shape(Size(64, 64, num_frames=5))


def test_check_model_passes(checkpoint: Path) -> None:
    """An exported adapter, loaded by diffusers, samples as the adapter in the trainer does; see its rules."""
    found = {result.name: (str(result.status), result.detail) for result in check_model(str(checkpoint))}
    assert found.keys() == {"files", "classes", "rows", "ratio", "parity", "lora", "reload"}
    assert set(found.values()) == {("pass", "")}
