"""The page about rewards from made-up runs, and how a validation is measured. The runs themselves are real jobs; a
short one is tests/e2e/test_judge.py."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bench.rewards import learning as reward_learning
from bench.rewards.learning import hacking_plans, judge_plans
from bench.rewards.runs import Trained, Validation, validation_of
from flowfleet.client.types import Sample
from flowfleet.job.files import prepare_job

ROOT = Path(__file__).parents[3]


def sign(top: int) -> np.ndarray:
    """A black board with a white bar of 8 rows."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[top : top + 8, 16:48] = 255
    return pixels


def test_a_validation_is_measured_over_who_has_a_score() -> None:
    samples = [
        Sample(step=0, group=0, index=0, prompt="a", scores={"judge": 0.75, "ocr": 1.0}),
        Sample(step=0, group=1, index=0, prompt="b", scores={"judge": 0.25, "ocr": None}),
        Sample(step=0, group=2, index=0, prompt="c", scores={"judge": 0.5, "ocr": 0.0, "ocr.exact": 0.0}),
    ]
    high, low = sign(12), sign(44)  # middles at 16 and 48 of 64
    found = validation_of(4, 96, samples, [high, high, low], ["judge", "ocr"])
    assert found.scores == {"judge": pytest.approx(0.5), "ocr": pytest.approx(0.5)}
    assert found.spread["ocr"] == pytest.approx(0.5 / np.sqrt(2))
    assert found.measures["word_rise"] == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert found.measures["judge_right"] == pytest.approx(2 / 3)  # 0.5 is no yes, and the third is low


def test_plans_have_a_control_of_the_first_seed() -> None:
    assert [plan.key for plan in judge_plans([4, 5])] == ["judge-4", "frozen-4", "judge-5"]
    assert [plan.key for plan in hacking_plans([1])] == ["hacked-1", "guarded-1"]


def test_the_controls_changes_are_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (frozen,) = [plan for plan in judge_plans([1]) if plan.changes]
    spec = prepare_job(Path(f"recipes/{frozen.recipe}.toml"), list(frozen.changes), same_machine=True)
    assert spec.trainer.optimizer.lr == 1e-12


def finished(directory: Path, name: str, seed: int, after: float) -> None:
    """What a run leaves, with made-up figures."""
    scores = ("jpeg_compressibility", "ocr", "image_quality", "judge")
    measures = {"edge_density": 30.0, "colour_entropy": 2.0, "word_rise": 0.1, "judge_right": 0.9}
    validations = [
        Validation(version, 48 * version, dict.fromkeys(scores, value), measures, dict.fromkeys(scores, 0.01))
        for version, value in ((0, 0.5), (4, after))
    ]
    counters = {"cache/hit": 7.0, "cache/miss": 93.0, "calls/ok": 93.0, "retries": 2.0, "answers/logprobs": 100.0}
    Trained(name, seed, {}, validations, 3, counters).write(directory / f"{name}-{seed}")
    pictures: dict[str, Any] = {str(version): np.stack([sign(20)] * 2) for version in (0, 4)}
    pictures["prompts"] = np.array(['A red sign that says "K7"'] * 2)
    np.savez(directory / f"{name}-{seed}" / "pictures.npz", **pictures)


def test_the_page_is_made_of_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, runs = tmp_path / "docs" / "results.md", tmp_path / "runs"
    page.parent.mkdir()
    shutil.copy(ROOT / "docs/results.md", page)
    monkeypatch.setattr(reward_learning, "RESULTS", tmp_path)
    finished(runs, "hacked", 1, 0.9)
    finished(runs, "guarded", 1, 0.6)
    finished(runs, "judge", 1, 0.8)
    finished(runs, "frozen", 1, 0.5)
    monkeypatch.setattr(sys, "argv", ["bench", "page", "--directory", str(runs), "--page", str(page)])

    assert reward_learning.main() == 0

    text = page.read_text()
    assert "| [tiny_hacked](../recipes/tiny_hacked.toml) | 1 | 192 | 0.500 → 0.900 |" in text
    assert "| [tiny_judge](../recipes/tiny_judge.toml), frozen | 1 | 192 | 0.500 → 0.500 |" in text
    assert "| judge, seed 1 | 100 | 7 | 93 | 2 | 0 | 100 | 0 | 0 | 90.0% → 90.0% |" in text
    for name in ("reward_hacking", "reward_hacking_curves", "reward_judge", "reward_judge_curves"):
        with Image.open(page.parent / "images" / f"{name}.png") as picture:
            assert min(picture.size) > 200
    assert [run["name"] for run in json.loads((tmp_path / "learning-judge.json").read_text())] == ["judge", "frozen"]
