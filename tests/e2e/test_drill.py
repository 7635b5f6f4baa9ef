"""The restore drill of docs/operations.md, walked: its very commands, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.pages import commands

pytestmark = pytest.mark.long


def test_the_restore_drill_of_the_operations_page(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    drill = commands((ROOT / "docs/operations.md").read_text(), "Restore drill")
    (tmp_path / "few.txt").write_text("a sign that says CAT\na sign that says DOG\n")
    smaller = "--set rollout.prompts_per_step=4 --set schedule.steps=4 --set data.validation=few.txt"
    drill = drill.replace("recipes/tiny_ocr.toml", f"recipes/tiny_ocr.toml {smaller}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    try:
        walked = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", drill], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=400, check=False,
        )  # fmt: skip
    finally:
        subprocess.run(["flowfleet", "down"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert walked.returncode == 0, walked.stdout + walked.stderr
    assert "step-00000003: version 3 is ahead of the ledger, which is at version 2" in " ".join(walked.stdout.split())
    assert "succeeded" in walked.stdout
