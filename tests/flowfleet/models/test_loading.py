"""Dummy weights, and models without any."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from flowfleet.models.base import ModelAdapter
from flowfleet.models.families.hunyuan_video_15 import HunyuanVideo15ImageAdapter
from flowfleet.models.families.qwen_image_edit import QwenImageEditAdapter
from flowfleet.models.families.wan_image import WanImageAdapter
from flowfleet.models.loading import dummy_parameter
from flowfleet.models.registry import adapter_for, family_of
from flowfleet.models.settings import Size
from tests.tiny_models import MAKERS, make_tiny


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [("a.norm.weight", (7,), 1.0), ("vae.norm.gamma", (7, 1, 1, 1), 1.0), ("a.linear.bias", (7,), 0.0)],
)
def test_dummy_scales_are_one_and_biases_zero(name: str, shape: tuple[int, ...], value: float) -> None:
    assert torch.equal(dummy_parameter(name, shape, torch.float32, "cpu"), torch.full(shape, value))


def test_dummy_matrices_are_normal_and_drawn_from_their_name() -> None:
    torch.manual_seed(0)
    first = dummy_parameter("transformer.a.weight", (300, 400), torch.float32, "cpu")
    torch.manual_seed(1)
    assert torch.equal(first, dummy_parameter("transformer.a.weight", (300, 400), torch.float32, "cpu"))
    assert float(first.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(first.mean())) < 5 * 0.02 / 120_000**0.5
    other = dummy_parameter("transformer.b.weight", (300, 400), torch.float32, "cpu")
    assert abs(float((first * other).mean())) < 5 * 0.02**2 / 120_000**0.5
    half = dummy_parameter("transformer.a.weight", (300, 400), torch.bfloat16, "cpu")
    assert torch.equal(half, first.to(torch.bfloat16))


def configurations_of(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint without any weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    return folder


def models_of(adapter: ModelAdapter) -> dict[str, nn.Module]:
    parts = [part for names in adapter.parts.values() for part in names]
    found = {part: getattr(adapter.pipeline, part, None) for part in parts}
    return {part: module for part, module in found.items() if isinstance(module, nn.Module)}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_dummy_model_differs_from_a_loaded_one_in_its_parameters_alone(kind: str, tmp_path: Path) -> None:
    """The dummy with the loaded parameters computes the same bits: its buffers and tables are right."""
    path, dtype = make_tiny(kind, tmp_path / "model"), torch.bfloat16
    family = adapter_for(path)
    loaded = family.load(path, dtype=dtype)
    owned = [parameter.data_ptr() for expert in loaded.experts.values() for parameter in expert.parameters()]
    assert not any(address % 64 for address in owned), "they begin as a trainer's do, not as the mapped file's"
    empty = configurations_of(path, tmp_path / "empty")
    dummy = family.load(empty, dtype=dtype, load_format="dummy")
    assert models_of(dummy).keys() == models_of(loaded).keys()
    for part, module in models_of(dummy).items():
        expected = models_of(loaded)[part]
        assert not module.training
        buffers, expected_buffers = dict(module.named_buffers()), dict(expected.named_buffers())
        assert buffers.keys() == expected_buffers.keys()
        for name, buffer in buffers.items():
            assert buffer.dtype == expected_buffers[name].dtype, name
            if name.startswith(("bn.", "latents_")):  # statistics, which a checkpoint holds
                buffer.copy_(expected_buffers[name])
            assert torch.equal(buffer, expected_buffers[name]), name
        given, parameters = dict(module.named_parameters()), dict(expected.named_parameters())
        assert given.keys() == parameters.keys()
        for name, parameter in given.items():
            drawn = dummy_parameter(f"{part}.{name}", parameters[name].shape, parameter.dtype, "cpu")
            assert torch.equal(parameter, drawn), name
            assert parameter.dtype == parameters[name].dtype, name
            assert not parameter.requires_grad
            parameter.data.copy_(parameters[name])
    size = Size(64, 64, 9 if family_of(path).modality == "video" else 1)
    refilled = family(dummy.pipeline, dummy.vae_config, dtype=dtype, device=dummy.device)
    assert torch.equal(picture(refilled, size), picture(loaded, size))


def picture(adapter: ModelAdapter, size: Size) -> torch.Tensor:
    """One step of sampling, encoded and decoded: (1, F, H, W, 3)."""
    images = None
    if isinstance(adapter, QwenImageEditAdapter | WanImageAdapter | HunyuanVideo15ImageAdapter):
        images = [[Image.new("RGB", (64, 64), "red")]]
        adapter.size_conditions(size)
    if isinstance(adapter, QwenImageEditAdapter):
        adapter.resize_conditions(1024)
    prompts = adapter.encode(["a red ball"], images=images)
    latents = adapter.initial_latents([1], size)
    with torch.no_grad():
        moved = latents - adapter.velocity(latents, torch.tensor(900.0), prompts, size=size)
    return adapter.decode(moved, size)


def test_an_empty_model_has_no_parameters_in_memory(tmp_path: Path) -> None:
    path = configurations_of(make_tiny("qwen_image", tmp_path / "model"), tmp_path / "empty")
    adapter = adapter_for(path).load(
        path, dtype=torch.bfloat16, components=("transformer",), device="cpu", load_format="empty"
    )
    parameters = list(adapter.transformer.parameters())
    assert {(parameter.device.type, parameter.dtype) for parameter in parameters} == {("meta", torch.bfloat16)}
    assert adapter.text_encoder is adapter.vae is None


def test_weights_must_be_there_unless_they_are_dummies(tmp_path: Path) -> None:
    path = configurations_of(make_tiny("qwen_image", tmp_path / "model"), tmp_path / "empty")
    with pytest.raises(ValueError, match="cannot be loaded"):
        adapter_for(path).load(path, dtype=torch.float32)
    (path / "transformer" / "config.json").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        adapter_for(path).load(path, dtype=torch.float32, load_format="dummy")
