"""Scores by category, and the best of several pictures, with judges that say what the test says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from recipes.composition.evaluate import best_of, by_category, features_of_renders, unlike
from recipes.composition.judges.files import Kind
from recipes.composition.judges.findings import Findings, Thing
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.render import render
from recipes.composition.scenes import draw
from recipes.composition.world import World


class _BrightnessJudge:
    """Sees as many cats as a picture is bright: the level of its first pixel."""

    def look(self, pictures: torch.Tensor) -> list[Findings]:
        counts = (pictures[:, 0, 0, 0] * 255).round().int().tolist()
        return [Findings([_cat(place) for place in range(count)], "noto", "") for count in counts]


def _cat(place: int) -> Thing:
    return Thing("cat", (10.0 * place, 0.0, 10.0 * place + 9, 9.0), 0.9, "red")


def _asking(counts: Sequence[int], tag: str = "counting") -> list[dict[str, Any]]:
    requests = [{"tag": tag, "include": [{"class": "cat", "count": n}]} for n in counts]
    return [{"prompt": "cats", "metadata": {"tag": tag, "geneval": json.dumps(request)}} for request in requests]


def _showing(*counts: int) -> np.ndarray:
    return np.stack([np.full((8, 8, 3), count, np.uint8) for count in counts])


def test_the_mean_is_over_categories() -> None:
    lines = [*_asking([1, 2, 3]), *_asking([1], "single_object")]
    found = by_category(_BrightnessJudge(), _showing(1, 2, 2, 0), lines, "strict")
    assert found == {"single_object": 0.0, "counting": 2 / 3, "mean": 1 / 3}


def test_the_best_of_several_is_what_the_chooser_likes_most() -> None:
    lines = _asking([1, 2, 3])
    chosen = best_of([_showing(1, 1, 1), _showing(0, 2, 1), _showing(1, 1, 3)], _BrightnessJudge(), lines)
    assert chosen[:, 0, 0, 0].tolist() == [1, 2, 3]


def test_pictures_are_compared_with_renders_and_with_one_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.composition.evaluate.NUM_RENDERS", 24)
    torch.manual_seed(1)
    judge = HeldoutJudge(Kind.of("heldout", world))
    renders = features_of_renders(judge, world)
    assert len(renders) == 24
    scenes = draw(world, 24, torch.Generator().manual_seed(5), split="any")
    pictures = (render(world, scenes, "cpu").permute(0, 2, 3, 1) * 255).round().byte().numpy()
    noise = np.random.default_rng(1).integers(0, 255, pictures.shape, np.uint8)
    assert unlike(judge, pictures, [pictures], renders).keys() == {"distance_to_renders"}
    near = unlike(judge, pictures, [pictures, pictures], renders)
    assert near["diversity"] == 0.0
    assert near["distance_to_renders"] < unlike(judge, noise, [pictures, noise], renders)["distance_to_renders"]
