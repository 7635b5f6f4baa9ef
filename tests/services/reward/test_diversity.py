"""`diversity` and `feature_diversity` against GARDO's formula, pair by pair in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import Dinov2Config, Dinov2Model
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make
from services.reward.scorers.diversity import distances
from tests.tiny_models.clip import randomize

SIDE = 32
GROUPS = ("a", "b", "a", "b", "a", "alone")


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in GROUPS]


def scores(name: str, images: list[Image.Image], settings: dict[str, Any]) -> list[float]:
    scorer = make(name, settings, 1)
    assert isinstance(scorer, Scorer)
    assert scorer.needs_group
    scorer.start()
    samples = [Sample(np.asarray(image)[None], "", group_id=group) for image, group in zip(images, GROUPS, strict=True)]
    outcomes = scorer.score(samples, scorer.parse({}))
    return [outcome.value for outcome in outcomes if isinstance(outcome, Score)]


def by_the_formula(features: list[NDArray[np.float64]]) -> list[float]:
    """min over the others of the group of 1 - cos."""
    found = []
    for row, (own, group) in enumerate(zip(features, GROUPS, strict=True)):
        others = [features[n] for n, other in enumerate(GROUPS) if other == group and n != row]
        cosines = [math.fsum(own * one) / math.sqrt(math.fsum(own**2) * math.fsum(one**2)) for one in others]
        found.append(min((1 - cosine for cosine in cosines), default=0.0))
    return found


def test_of_pixels() -> None:
    images = pictures()
    blocks = [np.asarray(image, np.float64).reshape(8, 4, 8, 4, 3).mean(axis=(1, 3)) / 255 - 0.5 for image in images]
    found = scores("diversity", images, {})
    assert found == pytest.approx(by_the_formula([block.ravel() for block in blocks]), abs=0.02)  # bytes are rounded
    assert min(found[:5]) > 0.1


def test_the_same_picture_twice_is_no_diversity() -> None:
    first, *rest = pictures()
    images = [first, *rest[:1], first, *rest[2:]]
    assert scores("diversity", images, {})[0] == scores("diversity", images, {})[2] == pytest.approx(0.0, abs=1e-12)


def test_of_the_features_of_a_model(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": SIDE}
    model = Dinov2Model(Dinov2Config(**tower))
    torch.manual_seed(0)
    randomize(model)
    model.save_pretrained(tmp_path)
    size = {"height": SIDE, "width": SIDE}
    processor = CLIPImageProcessorPil(size=size, crop_size=size)
    processor.save_pretrained(tmp_path)
    images = pictures()
    pixels = processor(images=images, return_tensors="pt").pixel_values
    with torch.no_grad():
        output = Dinov2Model.from_pretrained(tmp_path, dtype=torch.float64).eval()(pixel_values=pixels.double())
    expected = by_the_formula(list(output.pooler_output.numpy()))
    found = scores("feature_diversity", images, {"model": str(tmp_path), "device": "cpu", "batch_size": 4})
    assert found == pytest.approx(expected, abs=1e-4)


def test_vectors_of_no_length_are_far_from_all() -> None:
    assert distances([np.zeros(3), np.ones(3)]).tolist() == [[1.0], [1.0]]
    assert distances([np.ones(3)]).tolist() == [[0.0]]


def test_the_mean_distance_is_to_all_others_of_the_group() -> None:
    rows = [np.array(values, float) for values in ([1, 0], [0, 2], [-3, 0])]
    assert distances(rows).mean(axis=1).tolist() == pytest.approx([1.5, 1.0, 1.5])
