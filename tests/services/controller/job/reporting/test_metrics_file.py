"""metrics.jsonl through crashes: whole lines, each once."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.controller.job.reporting.figures import NUM_BINS, histogram, histograms
from services.controller.job.reporting.metrics_file import MetricsFile


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_written_once_by_any_number_of_controllers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for loss in (0.5, 0.25):  # the second is a controller that trains the step's end again after a restart
        file = MetricsFile(path)
        file.append("step", 0, {"actor/loss": loss, "bad": math.nan, "worse": math.inf})
        file.append("version", 0, {"val/reward": 1.0})
        file.append("step", 0, {"actor/loss": 9.0})
    first, second = lines(path)
    assert {name: value for name, value in first.items() if name != "time"} == {
        "step": 0,
        "actor/loss": 0.5,
        "bad": None,
        "worse": None,
    }
    assert second["version"] == 0


@pytest.mark.parametrize("cut", range(1, 30, 7))
def test_a_line_that_a_crash_left_incomplete_is_replaced(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(3):
        file.append("step", step, {"actor/loss": float(step)})
    path.write_bytes(path.read_bytes()[:-cut])
    MetricsFile(path).append("step", 2, {"actor/loss": 2.0})
    assert [(line["step"], line["actor/loss"]) for line in lines(path)] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_lines_that_are_no_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("a note\n3\n")
    MetricsFile(path).append("step", 0, {})
    assert path.read_text().startswith("a note\n3\n{")


def test_a_disk_that_cannot_be_written_costs_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "metrics.jsonl"
    file = MetricsFile(path)
    file.append("step", 0, {})
    assert "was not written" in caplog.text
    path.parent.mkdir()
    file.append("step", 1, {})
    assert [line["step"] for line in lines(path)] == [1]


def test_histograms_are_numpys() -> None:
    values = np.random.default_rng(3).normal(size=500).tolist()
    found = histogram(values)
    assert found is not None
    edges = np.linspace(min(values), max(values), NUM_BINS + 1)
    inside = [sum(low <= value < high for value in values) for low, high in itertools.pairwise(edges)]
    inside[-1] += values.count(max(values))
    assert found["counts"] == inside
    assert (found["low"], found["high"]) == (min(values), max(values))
    assert histograms({"rewards": [], "advantages": [2.0]}).keys() == {"advantages"}
