"""`aesthetic` against its layers one by one in float64, over transformers' own embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file
from transformers import CLIPModel, CLIPProcessor, SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make
from tests.tiny_models.clip import randomize, save_clip

WIDTH, SIDE = 16, 32
SIZES = (WIDTH, 12, 8, 1)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"), width=WIDTH)


def pictures(number: int) -> list[Image.Image]:
    rng = np.random.default_rng(1)
    return [Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(number)]


def head(path: Path, name: str, numbers: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> list[NDArray[np.float32]]:
    """Writes a head, and returns its tensors: weight, bias, weight, …"""
    rng = np.random.default_rng(2)
    tensors: dict[str, NDArray[np.float32]] = {}
    for number, before, after in zip(numbers, sizes, sizes[1:], strict=False):
        tensors[f"{name}.{number}.weight"] = rng.normal(size=(after, before)).astype(np.float32)
        tensors[f"{name}.{number}.bias"] = rng.normal(size=after).astype(np.float32)
    save_file(tensors, path)
    return list(tensors.values())


def by_layers(embeddings: NDArray[np.float64], tensors: list[NDArray[np.float32]]) -> list[float]:
    values = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        values = values @ weight.astype(np.float64).T + bias
    return [float(value) for value in values[:, 0]]


def scores(settings: dict[str, Any], images: list[Image.Image]) -> list[float]:
    scorer = make("aesthetic", {"device": "cpu"} | settings, 1)
    assert isinstance(scorer, Scorer)
    scorer.start()
    outcomes = scorer.score([Sample.of_picture(image, "") for image in images], scorer.parse({}))
    return [outcome.value for outcome in outcomes if isinstance(outcome, Score)]


def test_layer_after_layer_over_clip(clip: Path, tmp_path: Path) -> None:
    """The keys of the published head, whose layers are numbered with dropout between: 0, 2, 4."""
    tensors = head(tmp_path / "head.safetensors", "layers", (0, 2, 10))
    images = pictures(3)
    pixels = CLIPProcessor.from_pretrained(clip)(images=images, return_tensors="pt").pixel_values
    with torch.no_grad():
        output = CLIPModel.from_pretrained(clip, dtype=torch.float64).get_image_features(pixels.double())
    expected = by_layers(output.pooler_output.numpy(), tensors)
    found = scores({"model": str(clip), "head": str(tmp_path / "head.safetensors"), "batch_size": 2}, images)
    assert found == pytest.approx(expected, abs=1e-4)
    assert np.ptp(expected) > 0.1


def test_over_siglip(tmp_path: Path) -> None:
    tower = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SiglipVisionModel(SiglipVisionConfig(**tower, image_size=SIDE, patch_size=8))
    torch.manual_seed(0)
    randomize(model)
    model.save_pretrained(tmp_path)
    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(tmp_path)
    tensors = head(tmp_path / "head.safetensors", "scoring_head", (0, 2, 4))
    images = pictures(3)
    with torch.no_grad():
        pixels = processor(images=images, return_tensors="pt").pixel_values
        pooled = model.eval().double()(pixel_values=pixels.double()).pooler_output
    found = scores({"model": str(tmp_path), "head": str(tmp_path / "head.safetensors")}, images)
    assert found == pytest.approx(by_layers(pooled.numpy(), tensors), abs=1e-4)


def test_heads_that_do_not_fit(clip: Path, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    pickle = tmp_path / "head.pth"
    pickle.write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"settings\.head = .*head\.pth'.*pickles.*docs/scorers\.md"):
        make("aesthetic", {"model": str(clip), "head": str(pickle)}, 1)
    with pytest.raises(ValueError, match=r"settings\.head: field required"):
        make("aesthetic", {"model": str(clip)}, 1)
    for sizes in ((WIDTH, 12), (WIDTH, 12, 2)):
        head(path, "layers", (0, 2), sizes)
        with pytest.raises(ValueError, match=r"settings\.head = .*the last of one number"):
            make("aesthetic", {"model": str(clip), "head": str(path)}, 1)
    save_file({"other": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"settings\.head = .* has other: it takes linear layers"):
        make("aesthetic", {"model": str(clip), "head": str(path)}, 1)
    head(path, "layers", (0, 2), (WIDTH + 1, 12, 1))
    scorer = make("aesthetic", {"model": str(clip), "head": str(path), "device": "cpu"}, 1)
    assert isinstance(scorer, Scorer)
    with pytest.raises(ValueError, match=f"embeddings of {WIDTH + 1} numbers, settings.model makes {WIDTH}"):
        scorer.start()
