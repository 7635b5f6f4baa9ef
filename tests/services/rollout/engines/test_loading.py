"""Loading block by block: the same weights as at once, and a text encoder that streams."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.models.level_tables import table_of
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.quantization import layers
from services.rollout.engines import loading
from services.rollout.engines.acceleration import blocks
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.loading import load_by_blocks, load_others, load_plain
from tests.tiny_models import make_tiny

CPU, SIZE = torch.device("cpu"), Size(32, 48)


def spec_of(path: Path, **fields: Any) -> ModelSpec:
    return ModelSpec(path=str(path), dtype="bfloat16", **fields)


@pytest.mark.parametrize("kind", ["qwen_image", "stable_diffusion_3", "wan_two_experts"])
@pytest.mark.parametrize("format", ["", "dummy"])
def test_a_base_loaded_by_blocks_is_the_rounded_whole(
    kind: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    path = make_tiny(kind, tmp_path / "model")
    spec, family = spec_of(path, load_format=format), adapter_for(path)
    found, whole = load_by_blocks(family, spec, CPU), load_plain(family, spec, CPU)
    for expert in whole.experts.values():
        assert layers.replace_weights(blocks(expert).values()) > 0
    assert found.experts.keys() == whole.experts.keys()
    for component, expert in whole.experts.items():
        expected, seen = expert.state_dict(), found.experts[component].state_dict()
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in seen)
    assert found.text_encoder is not None
    assert found.vae is not None


def test_a_table_is_of_the_checkpoints_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    path = make_tiny("qwen_image", tmp_path / "model")
    spec, family = spec_of(path), adapter_for(path)
    plain = load_by_blocks(family, spec, CPU)
    found = load_by_blocks(family, spec, CPU, tabled=lambda adapter: adapter.level_layers)
    assert table_of(found.transformer) is not None
    latents, prompts = plain.initial_latents([1], SIZE), plain.encode(["a red sign"])
    with torch.no_grad():
        velocities = [it.velocity(latents, torch.tensor(700.0), prompts, size=SIZE) for it in (plain, found)]
    assert torch.equal(*velocities)


@pytest.mark.parametrize("format", ["", "dummy"])
@pytest.mark.parametrize("kind", ["qwen_image", "stable_diffusion_3", "flux", "qwen_image_edit"])
def test_a_streamed_text_encoder_says_the_same(
    kind: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    path = make_tiny(kind, tmp_path / "model")
    spec, family = spec_of(path, load_format=format), adapter_for(path)
    images = [[Image.linear_gradient("L").convert("RGB")]] if kind == "qwen_image_edit" else None
    whole = load_others(family, spec, CPU)
    monkeypatch.setattr(loading, "_has_room", lambda *_: False)
    found = load_others(family, spec, CPU)
    for adapter in (whole, found) if images else ():
        adapter.resize_conditions(1024)
    expected = whole.encode(["a red sign"], images=images)
    for _ in range(2):
        embeds = found.encode(["a red sign"], images=images)
        assert torch.equal(embeds.embeds, expected.embeds)
        assert all(torch.equal(embeds.extras[name], extra) for name, extra in expected.extras.items())


async def test_an_adapter_that_trains_modulation_brings_a_base_with_those_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    model = spec_of(make_tiny("qwen_image", tmp_path / "model"), quantization="fp8_base")
    engine = DiffusersEngine(CPU, max_batch=4, threads=1)

    async def has_table(*targets: str) -> bool:
        await engine.prepare(model, LoraSpec(rank=2, alpha=4.0, target_modules=targets))
        assert engine._adapter is not None
        return table_of(engine._adapter.transformer) is not None

    assert await has_table("to_q")
    first = engine._adapter
    assert await has_table("to_q", "to_k")
    assert engine._adapter is first
    assert not await has_table("to_q", "img_mod.1")
    assert await has_table("to_q")
    await engine.close()
