from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flowfleet.local.rewards import WITHOUT_SETTINGS as STARTED_BY_UP
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward import scorers
from services.reward.scorers.ocr import OcrParams


def test_flowfleet_up_knows_every_scorer() -> None:
    assert set(STARTED_BY_UP) <= set(scorers.SCORERS)


@pytest.mark.parametrize("name", STARTED_BY_UP)
def test_every_scorer_describes_itself(name: str) -> None:
    scorer = scorers.make(name, {}, 1)
    assert scorer.name == name
    assert scorer.version
    assert scorer.score_range[0] < scorer.score_range[1]
    assert len(set(scorer.components)) == len(scorer.components) > 0
    assert MODALITY_VIDEO in scorer.modalities
    assert (MODALITY_IMAGE in scorer.modalities) == (name != "motion")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no scorer is called 'beauty': take one of ocr, "):
        scorers.make("beauty", {}, 1)


def test_the_page_names_every_scorer_and_the_parameters_of_ocr() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scorers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in STARTED_BY_UP)
    assert all(f"| `{field.name}` |" in page for field in dataclasses.fields(OcrParams))


@pytest.mark.parametrize("name", STARTED_BY_UP)
def test_settings_that_a_scorer_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="colour: unknown setting; there are: none"):
        scorers.make(name, {"colour": "red"}, 1)
