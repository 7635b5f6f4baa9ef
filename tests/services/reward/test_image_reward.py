"""The scorer `image_reward` against the library's own model, where tests/packages put it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from services.reward.scorers import make
from tests.services.reward.library_process import told_by


def test_settings_are_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"settings\.weights = .* lacks ImageReward\.pt"):
        make("image_reward", {"weights": str(tmp_path)}, 1)
    with pytest.raises(ValueError, match=r"settings\.weights"):
        make("image_reward", {}, 1)
    (tmp_path / "bert-base-uncased").mkdir()
    for name in ("ImageReward.pt", "med_config.json", "bert-base-uncased/vocab.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"pip install .*\[reward-image-reward\]"):
        make("image_reward", {"weights": str(tmp_path)}, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("image_reward", tmp_path_factory.mktemp("image_reward"))


@pytest.mark.long
def test_scores_are_the_librarys(told: dict[str, Any]) -> None:
    assert told["scores"] == pytest.approx(told["library"], rel=1e-4)
    assert told["scores"][::3] == pytest.approx(told["ranked"], rel=1e-4)
    scores = sorted(told["library"])
    assert min(high - low for low, high in itertools.pairwise(scores)) > 1e-2, "picture and prompt both count"


@pytest.mark.long
def test_a_films_score_is_the_mean_and_unread_tokens_are_counted(told: dict[str, Any]) -> None:
    assert told["film"] == pytest.approx((told["library"][0] + told["library"][6]) / 2, rel=1e-4)
    assert told["cut_tokens"] == [0, 0, 2 + 3 * 20 - 35] * 3


@pytest.mark.long
def test_weights_are_files_of_the_folder_and_run_no_code(told: dict[str, Any]) -> None:
    assert "lacks ImageReward.pt" in told["missing"]
    assert "holds more than tensors" in told["pickle"]
    assert told["harmed"] is False
    assert "lacks 2 weights (mlp.layers.7." in told["cut"]
