"""The voting program, without a stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowfleet.api.votes import VotePair, VoteSide
from flowfleet.media.files import encode_media
from tests.e2e.voter import Voter, rise, warmth


def picture(red: int, green: int, blue: int) -> bytes:
    return encode_media(np.tile(np.array([red, green, blue], np.uint8), (1, 8, 8, 1)))[0]


@pytest.mark.parametrize(("color", "expected"), [((255, 0, 0), 255), ((10, 200, 60), -50), ((7, 7, 7), 0)])
def test_warmth_is_red_minus_blue(color: tuple[int, int, int], expected: float) -> None:
    assert warmth(picture(*color), "image/png") == expected


@pytest.mark.parametrize("errors", [0.0, 0.1, 0.5])
def test_the_voter_prefers_the_warmer_side_and_errs_as_often_as_it_says(errors: float) -> None:
    media = {"warm": picture(200, 0, 0), "cold": picture(0, 0, 200)}

    class Shown:
        def side(self, side: VoteSide) -> bytes:
            return media[side.media]

    client: Any = Shown()
    warm, cold = (VoteSide(index=k, media=name, media_type="image/png") for k, name in enumerate(media))
    voter = Voter("http://unused", "job", errors, seed=3, most=1)
    wrong = 0
    for turn in range(400):
        left, right = (warm, cold) if turn % 2 else (cold, warm)
        choice = voter._choice(client, VotePair(step=0, group=0, prompt="", left=left, right=right))
        wrong += choice != ("left" if left is warm else "right")
    deviation = (400 * errors * (1 - errors)) ** 0.5
    assert abs(wrong - 400 * errors) <= 4 * deviation


def test_a_rise_is_measured_in_deviations_of_the_mean_and_of_pictures() -> None:
    before, after = [10.0, 14.0, 10.0, 14.0], [20.0, 20.0, 24.0, 24.0]
    found = rise([before, after])
    deviation = (16 / 3) ** 0.5  # four values, each 2 from their mean, over n - 1
    assert (found["before"], found["after"], found["held_out"]) == (12.0, 22.0, 4)
    assert found["std_of_mean"] == pytest.approx(deviation / 2, abs=5e-4)
    assert found["rise_in_std_of_mean"] == pytest.approx(20 / deviation, abs=5e-3)
    assert found["rise_in_std_of_pictures"] == pytest.approx(10 / deviation, abs=5e-3)
