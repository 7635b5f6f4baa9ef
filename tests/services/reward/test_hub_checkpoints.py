"""Scorers whose model is a name of the Hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowfleet import hub
from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make
from tests.hub_models import NEW, OLD, served
from tests.tiny_models.clip import save_clip


def test_a_scorer_of_a_name_is_that_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_clip(tmp_path / "hub" / "Org" / "Clip")
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    sample = Sample.of_picture(Image.fromarray(pixels), "a red sign")

    def scored(model: str) -> tuple[float, Scorer[None]]:
        scorer = make("clip", {"model": model, "device": "cpu"}, 1)
        assert isinstance(scorer, Scorer)
        scorer.start()
        [outcome] = scorer.score([sample], None)
        assert isinstance(outcome, Score)
        return outcome.value, scorer

    with served(tmp_path, monkeypatch) as site:
        by_name, scorer = scored("Org/Clip")
        site.commit.insert(0, NEW)  # another process makes the same scorer from what is pinned
        assert scorer.pinned is not None
        assert Path(scorer.pinned["model"]).name == OLD
        assert make("clip", scorer.pinned, 1).version == scorer.version
        assert scorer.version.startswith("1 (Org/Clip ")
        monkeypatch.setenv(hub.MODELS, "")
        with pytest.raises(ValueError, match=r"settings\.model: .*hf download Org/Absent`"):
            make("clip", {"model": "Org/Absent"}, 1)
    assert by_name == scored(str(folder))[0]
