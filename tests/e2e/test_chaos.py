"""Seeded faults on a job, in both modes: nothing lost, nothing doubled, the weights of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.report import Report
from tests.faults.tools.clocks import find_library

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SEED = 17


@pytest.mark.parametrize(("mode", "faults"), [("lora", 12), ("full", 6)])
def test_a_job_survives_faults_with_the_same_weights(mode: str, faults: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--mode", mode, "--faults", str(faults), "--seed", str(SEED), "--spacing", "3"]
    words += ["--state-dir", str(tmp_path / "chaos")]
    command = [sys.executable, "-m", "flowfleet.cli.main", "chaos", *words, "--report", str(report)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.exists(), ended.stderr
    found = Report.model_validate_json(report.read_bytes())
    assert found.problems == [], ended.stdout
    assert found.faults_counted == faults
    assert "skew-clock" not in found.kinds_skipped or find_library() is None
    assert found.samples.are_exact
    assert found.weights == found.reference != ""
    assert ended.returncode == 0
