from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_SOUND, MODALITY_TEXT, MODALITY_VIDEO
from flowfleet.scorers import folders, without_settings
from services.reward import scorers
from services.reward.scorers.ocr import OcrParams

STARTED_BY_UP = without_settings()


def test_no_folder_lacks_a_description_and_the_light_image_runs_without_torch() -> None:
    packages = {path.parent.name for path in Path(scorers.__file__).parent.glob("*/__init__.py")}
    assert packages == {folder.name for folder in folders()}
    light = [f"services.reward.scorers.{folder.name}" for folder in folders() if folder.image == "reward"]
    program = f"import sys, {', '.join(light)}; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize("name", STARTED_BY_UP)
def test_every_scorer_describes_itself(name: str) -> None:
    scorer = scorers.make(name, {}, 1)
    assert scorer.name == name
    assert scorer.version
    assert scorer.score_range[0] < scorer.score_range[1]
    assert len(set(scorer.components)) == len(scorer.components) > 0
    if MODALITY_TEXT not in scorer.modalities:
        assert {MODALITY_VIDEO, MODALITY_SOUND} & set(scorer.modalities)
        assert (MODALITY_IMAGE in scorer.modalities) == (name not in ("motion", "loudness"))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no scorer is called 'beauty': take one of aesthetic, "):
        scorers.make("beauty", {}, 1)


def test_the_page_names_every_scorer_and_the_parameters_of_ocr() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scorers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in scorers.SCORERS)
    assert all(f"- `{field.name}` (" in page for field in dataclasses.fields(OcrParams))


@pytest.mark.parametrize("name", STARTED_BY_UP)
def test_settings_that_a_scorer_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="colour: unknown setting; there are: none"):
        scorers.make(name, {"colour": "red"}, 1)
