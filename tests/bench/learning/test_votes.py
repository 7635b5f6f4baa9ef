"""The voter of `bench.learning.votes` and its page from made-up runs, without a stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.learning.votes import Voter, rise, warmth
from bench.learning.votes_page import write_page
from flowfleet.client.votes import VotePair, VoteSide
from flowfleet.media.files import encode_media


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


def test_the_page_has_a_row_a_run(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("a\n<!-- generated: learning-votes -->\n<!-- end: learning-votes -->\nz\n")
    pictures = np.zeros((2, 8, 8, 3), np.uint8)
    for voter, seed, after in (("random", 1, 12.5), ("warm", 1, 22.0)):
        run = runs / f"{voter}-{seed}"
        run.mkdir(parents=True)
        figures = rise([[10.0, 14.0], [after, after]])
        row = {"voter": voter, "seed": seed, "votes": 370, "consistency": 0.9, "repeats": 20, **figures}
        (run / "run.json").write_text(json.dumps({**row, "curve": [[0, 12.0], [6, after]]}))
        arrays: dict[str, Any] = {"prompts": np.array(["a", "b"]), "0": pictures, "6": pictures}
        np.savez_compressed(run / "pictures.npz", **arrays)
    write_page(runs, page, tmp_path / "results.json")
    warm, random = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert "12.0 → 22.0 | +5.0 | +3.5" in warm  # 10 over the deviation 2 of the mean, and over 8 ** 0.5
    assert "12.0 → 12.5 | +0.2 | +0.2" in random
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2
    assert {path.name for path in (page.parent / "images").iterdir()} == {"votes.png", "votes_curves.png"}
