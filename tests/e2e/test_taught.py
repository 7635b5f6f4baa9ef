"""An edit and a film's sound through all services: bases that are taught in seconds learn a rule, and nothing where its
conditions are shuffled. `TAUGHT_SEEDS=3` repeats each with other seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import read_job_file
from tests.e2e.conftest import ROOT, Fleet
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
GAIN = 0.2
CHANCE = 0.13
"""Bound of what shuffled conditions may give: three standard deviations of the difference of two means of 256 scores
that are 0 or 1."""
SEEDS = range(1, 1 + int(os.environ.get("TAUGHT_SEEDS", "1")))


def teach(module: str, kind: str, folder: Path) -> Path:
    """Runs a maker as its user does; returns the folder of model and prompt files."""
    base = make_tiny(kind, folder / "random")
    command = [sys.executable, "-m", f"recipes.tiny_taught.{module}", "--base", str(base), "--output", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1200)
    return folder


def gain(fleet: Fleet, recipe: str, folder: Path, seed: int, suffix: str = "") -> float:
    """The gain of the held-out reward by a recipe, printed with the time from the submit to the end."""
    job: dict[str, Any] = read_job_file(ROOT / "recipes" / recipe)
    job["model"]["path"], job["seed"] = str(folder / "model"), seed
    job["data"] = {name: str(folder / f"{name}{suffix}.jsonl") for name in ("train", "validation")}
    began = time.monotonic()
    done = fleet.run(job, 900.0)
    assert done.status == "succeeded", done.reason
    for row in fleet.metrics(done):
        assert row.values["rollout_corr/ratio_min"] == row.values["rollout_corr/ratio_max"] == 1.0
    held = [value for row in fleet.client.metrics(done.id) if (value := row.values.get("val/reward")) is not None]
    seconds = time.monotonic() - began
    print(f"{recipe}{suffix}, seed {seed}: {' '.join(f'{value:.3f}' for value in held)} in {seconds:.0f} s")
    return held[-1] - held[0]


@pytest.mark.parametrize(
    ("recipe", "module", "kind", "reward"),
    [
        ("tiny_edit.toml", "edit", "flux_kontext", "followed=recipes/tiny_taught/rewards.py:followed"),
        ("tiny_sound.toml", "sound", "ltx2", "loudness"),
    ],
)
def test_it_learns_unless_conditions_are_shuffled(
    make_fleet: Callable[..., Any], tmp_path: Path, recipe: str, module: str, kind: str, reward: str
) -> None:
    folder = teach(module, kind, tmp_path / "taught")
    with make_fleet(rewards=(reward,), model=str(folder / "model")) as fleet:
        for seed in SEEDS:
            assert gain(fleet, recipe, folder, seed) >= GAIN
        assert gain(fleet, recipe, folder, 1, "-shuffled") < CHANCE
