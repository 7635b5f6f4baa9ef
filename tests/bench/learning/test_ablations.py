"""The studies of settings on composition: their jobs, and the table of what they came to."""

from pathlib import Path

import pytest

from bench.learning.ablations import STUDIES, plan, study_table
from bench.learning.composition import JUDGE
from bench.learning.results import Result
from flowfleet.job.files import prepare_job
from flowfleet.job.spec import JobSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def jobs(study: str, directory: Path) -> dict[str, JobSpec]:
    return {
        run.directory.name: prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
        for run in plan(study, [1], directory)
    }


@pytest.mark.parametrize("study", STUDIES)
def test_every_line_is_a_job_that_makes_as_many_pictures(study: str, tmp_path: Path) -> None:
    found = jobs(study, tmp_path)
    assert len(found) == len(STUDIES[study])
    assert {one.rollout.prompts_per_step * one.rollout.group_size for one in found.values()} == {144}
    assert {one.algorithm.name for one in found.values()} == {"flow_grpo"}


def test_lines_change_what_they_say(tmp_path: Path) -> None:
    stale = jobs("staleness", tmp_path)
    assert stale["at_most_4-corrected-1"].schedule.max_staleness == 4
    assert stale["at_most_4-corrected-1"].algorithm.correction.mode == "truncated"
    assert stale["at_most_4-1"].algorithm.correction.mode == "none"
    guards = jobs("guards", tmp_path)
    assert guards["reward_alone-1"].algorithm.kl_coef == 0.0
    assert guards["gate-1"].rewards["image_quality"].gate is not None
    assert guards["GARDO-1"].algorithm.kl_gate.rewards == ("image_quality",)


def test_seeds_come_whole(tmp_path: Path) -> None:
    assert [run.seed for run in plan("group", [1, 2], tmp_path)] == [1] * 4 + [2] * 4


def test_the_table_pairs_before_and_after() -> None:
    summary = {
        "held_out_reward_after": 0.7,
        "training_seconds": 120.0,
        "watched": {JUDGE: {"before": 0.4, "after": 0.5, "bootstrap_ci95": [0.02, 0.2]}},
        **dict.fromkeys(("edge_density_before", "edge_density_after"), 8.0),
        **dict.fromkeys(("colour_entropy_before", "colour_entropy_after"), 2.0),
    }
    (row,) = study_table({STUDIES["group"][2]: [Result(summary, ())]}).splitlines()[2:]
    assert row == "| 12 × 12 | 1 | 0.400 | 0.500 | +0.100 | ≥ +0.020 | 0.700 | 120 | +0.0 % | +0.0 % |"
