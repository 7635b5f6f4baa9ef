"""Each recipe of recipes/papers, at a tiny size: submitted, run, and exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.job.setting_files import put, read_table
from flowfleet.job.spec import read_job_file
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.matrix.cases import reward_for, write_questions
from tests.recipes.papers import FOLDER, read_recipes

SIZES = read_table(Path(__file__).with_name("paper_sizes.toml"), "a table of sizes")


def recipes(*, writes: bool) -> list[str]:
    """Names of those whose models write text, or of the others."""
    algorithms = {name: read_job_file(FOLDER / f"{name}.toml")["algorithm"]["name"] for name in sorted(read_recipes())}
    return [name for name, algorithm in algorithms.items() if writes_text(algorithm) == writes]


def writes_text(algorithm: str) -> bool:
    return LOSSES[ALGORITHMS[algorithm].loss].kind == "sequence"


def make_job(name: str, checkpoint_of: Callable[[str], Path], data: Path) -> dict[str, Any]:
    """The recipe with the sizes of paper_sizes.toml, on a tiny checkpoint, with a reward that needs no model."""
    job = read_job_file(FOLDER / f"{name}.toml")
    algorithm = ALGORITHMS[job["algorithm"]["name"]]
    writes, is_pairs = writes_text(algorithm.name), algorithm.data == "preferences"
    changes = SIZES["settings"] | SIZES["settings_of_text" if writes else "settings_of_pictures"]
    changes |= SIZES["settings_of_pairs" if is_pairs else "settings_of_prompts"]
    changes |= SIZES["settings_of_lora"] if job["trainer"]["mode"] == "lora" else {}
    changes |= SIZES["settings_of_gradients"] if LOSSES[algorithm.loss].kind == "gradient" else {}
    changes |= {
        "model.path": str(checkpoint_of(SIZES["checkpoints"][job["model"]["path"]])),
        "data.train": str(data / ("001.jsonl" if is_pairs else "000.jsonl")),
        "data.validation": str(data / "000.jsonl"),
    }
    if writes:
        changes["data.train"] = changes["data.validation"] = str(write_questions(data, has_images=True))
    service = "letters" if writes else reward_for(algorithm.name)
    for reward in job.setdefault("rewards", {service: {}}).values():
        reward["service"] = service
    for setting, value in changes.items():
        put(job, setting, value)
    return job


@pytest.mark.long
@pytest.mark.parametrize("name", recipes(writes=False))
def test_the_recipe_runs(fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, name: str) -> None:
    check_recipe(fleet, make_job(name, checkpoint_of, data))


def check_recipe(fleet: Fleet, spec: dict[str, Any]) -> None:
    """Runs it: every sample is accounted for, numbers are finite, and there is a gradient."""
    job = fleet.run(spec)

    steps, rollout = spec["schedule"]["steps"], spec["rollout"]
    assert_accounted(job, steps * rollout["prompts_per_step"] * rollout.get("group_size", 2))
    rows = [row.values for row in fleet.metrics(job)]
    assert len(rows) == steps
    assert all(value is None or math.isfinite(value) for row in rows for value in row.values()), rows
    assert any((row["actor/grad_norm"] or 0) > 0 for row in rows), "no gradient in any step"
    assert Path(job.results["model"]).is_dir()
