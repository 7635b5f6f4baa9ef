"""A pair of each kind of loss, tiny recipes, and vLLM, through the services as processes: two steps each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.files import RECIPES
from flowfleet.job.spec import read_job_file
from recipes.tiny_unified.__main__ import main as make_model
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.matrix.cases import LETTERS, ROUNDING, THROUGH_SERVICES, check

pytestmark = pytest.mark.long

PICTURES = [case for case in THROUGH_SERVICES if case[0] != "qwen3"]
TEXTS = [case for case in THROUGH_SERVICES if case[0] == "qwen3"]
VLLM_CASES = [("qwen3", "gspo", "lora"), ("qwen3_moe", "grpo", "full"), ("thinker", "gspo", "lora")]
TOLERANCE = 1e-4
"""Ratios between the trainer's log-probs and vLLM's, in float32, are that near 1."""


@pytest.fixture(scope="module")
def fleet(
    make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    """A stack of processes with rollouts of the engine that the test names."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "my_rewards.py").write_text(LETTERS)
    letters = f"letters=python:function=my_rewards:letters,path={folder},text=true,score_min=0,score_max=1"
    rewards = ("jpeg_compressibility", "image_quality") if request.param == "diffusers" else (letters,)
    with make_fleet(rewards=rewards, model=None, engine=request.param) as running:
        yield running


@pytest.mark.parametrize("fleet", ["diffusers"], indirect=True)
@pytest.mark.parametrize(("kind", "algorithm", "mode"), PICTURES)
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode)


@pytest.mark.parametrize("fleet", ["diffusers"], indirect=True)
@pytest.mark.parametrize("kind", ["bagel", "hunyuan_image3"])
def test_the_tiny_recipe_runs_on_the_model_that_its_command_makes(fleet: Fleet, kind: str, tmp_path: Path) -> None:
    job = read_job_file(RECIPES / f"tiny_{kind}.toml")
    assert job["model"]["path"] == f"runs/tiny_{kind}"
    make_model([kind, "--output", str(tmp_path / kind)])
    job["model"]["path"] = str(tmp_path / kind)
    few = tmp_path / "few.txt"
    few.write_text("\n".join((RECIPES.parent / job["data"]["validation"]).read_text().splitlines()[:8]))
    job["data"] |= {"train": str(RECIPES.parent / job["data"]["train"]), "validation": str(few)}
    job["schedule"] = {"steps": 2, "save_every": 2, "validate_every": 2}
    done = fleet.run(job)
    assert_accounted(done, 2 * job["rollout"]["prompts_per_step"] * job["rollout"]["group_size"])
    assert all((row.values["actor/grad_norm"] or 0) > 0 for row in fleet.metrics(done))


@pytest.mark.parametrize("fleet", ["transformers"], indirect=True)
@pytest.mark.parametrize(("kind", "algorithm", "mode"), TEXTS)
def test_the_algorithm_trains_the_model_that_writes(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode, tolerance=ROUNDING)


@pytest.mark.parametrize("fleet", ["vllm"], indirect=True)
@pytest.mark.parametrize(("kind", "algorithm", "mode"), VLLM_CASES)
def test_vllm_samples_for_the_algorithm(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    """Weights and adapters reach vLLM's layers: the second step's ratios hold as the first's do."""
    check(fleet, checkpoint_of(kind), data, algorithm, mode, tolerance=TOLERANCE)
