"""The scorer `hpsv3` against the library's inferencer, where tests/packages put it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.reward.scorers import make
from tests.services.reward.library_process import told_by


def test_settings_are_refused_with_what_to_change(tmp_path: Path) -> None:
    weights = tmp_path / "HPSv3.safetensors"
    settings = {"weights": str(weights), "model": str(tmp_path)}
    with pytest.raises(ValueError, match=r"settings\.weights = .*: name the file HPSv3\.safetensors"):
        make("hpsv3", settings, 1)
    save_file({"x": np.zeros(1)}, weights)
    with pytest.raises(ValueError, match=r"settings\.model = .* has no config\.json"):
        make("hpsv3", settings, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(ValueError, match="this scorer takes qwen2_vl"):
        make("hpsv3", settings, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(ValueError, match=r"pip install .*\[reward-hpsv3\]"):
        make("hpsv3", settings, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("hpsv3", tmp_path_factory.mktemp("hpsv3"))


@pytest.mark.long
def test_scores_are_the_librarys(told: dict[str, Any]) -> None:
    for ours, theirs in zip(told["scores"], told["library"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    scores = sorted(mean for mean, _ in told["library"])
    assert min(high - low for low, high in itertools.pairwise(scores)) > 1e-3, "picture and prompt both count"


@pytest.mark.long
def test_a_films_score_is_the_mean(told: dict[str, Any]) -> None:
    assert told["film"] == pytest.approx((told["library"][0][0] + told["library"][6][0]) / 2, rel=1e-4)


@pytest.mark.long
def test_what_the_model_cannot_read_fails_alone(told: dict[str, Any]) -> None:
    mark, score, thin = told["marked"]
    assert "the prompt contains <|Reward|>" in mark
    assert score == pytest.approx(told["library"][0][0], rel=1e-4)
    assert "more than 200 times" in thin
    assert "cannot be loaded" in told["wrong"]
