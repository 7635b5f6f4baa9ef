from __future__ import annotations

import math

import numpy as np
import pytest

from services.reward.scorer import NO_FRAMES, Outcome, Problem, Sample, Score
from services.reward.scorers.loudness import LoudnessScorer, level_of


def heard(amplitude: float, metadata: dict[str, str] | None = None, **params: str) -> Outcome:
    """The outcome of a sine of that amplitude."""
    wave = (amplitude * np.sin(np.arange(16_000) * 2 * np.pi * 440 / 16_000)).astype(np.float32)
    scorer, sample = LoudnessScorer(), Sample(NO_FRAMES, "a dog", metadata or {}, sound=wave)
    return scorer.score([sample], scorer.parse(params))[0]


@pytest.mark.parametrize("amplitude", [1.0, 0.1, 0.01])
def test_the_score_is_the_distance_of_levels(amplitude: float) -> None:
    level = 20 * math.log10(amplitude / math.sqrt(2))  # of a sine
    found = heard(amplitude, {"loudness": "-20"}, reach="30")
    assert isinstance(found, Score)
    assert found.components["level"] == pytest.approx(level, abs=1e-3)
    assert found.value == pytest.approx(max(0.0, 1 - abs(level + 20) / 30), abs=1e-4)


def test_silence_has_a_level() -> None:
    assert level_of(np.zeros(10, np.float32)) == level_of(np.empty(0, np.float32)) == -100


@pytest.mark.parametrize("said", [None, "loud", "3", "nan"])
def test_a_wrong_level_is_said(said: str | None) -> None:
    found = heard(0.1, None if said is None else {"loudness": said})
    assert isinstance(found, Problem)
    assert "give a level from -100 to 0 dB" in found.message
    assert isinstance(heard(0.1, loudness="-20"), Score)


def test_wrong_parameters_are_named() -> None:
    for params in ({"reach": "0"}, {"loudness": "3"}, {"lodness": "-3"}):
        with pytest.raises(ValueError, match=r"params\."):
            LoudnessScorer().parse(params)
