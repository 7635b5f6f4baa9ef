"""Ways to compute, paired by seed."""

from pathlib import Path

import pytest

from bench.learning.results import Result
from bench.learning.same import FULL_WAYS, WAYS, plan, same_table
from flowfleet.job.files import prepare_job


def result(after: float, seconds: float) -> Result:
    return Result({"held_out_reward_after": after, "improvement": after - 0.5, "training_seconds": seconds}, ())


def test_differences_are_of_the_same_seeds() -> None:
    found = {
        "plain": {1: result(0.90, 100), 2: result(0.80, 100)},
        "only": {1: result(0.91, 50), 2: result(0.82, 50), 3: result(0.10, 50)},
        "merged": {2: result(0.70, 40)},
    }
    plain, only, merged = same_table(found).splitlines()[2:]
    assert "| – | – |" in plain
    assert "+0.015 (+0.010 … +0.020) | yes" in only
    assert "-0.100 | no | +0.500 |" in merged


@pytest.mark.parametrize(("recipe", "ways"), [("tiny_ocr", WAYS), ("tiny_ocr_full", FULL_WAYS)])
def test_every_way_is_a_job_of_the_recipe(recipe: str, ways: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    runs = plan(recipe, list(ways), [1, 2], tmp_path)
    assert [run.directory.parent.name for run in runs[: len(ways)]] == list(ways)
    for run in runs:
        spec = prepare_job(Path(f"recipes/{recipe}.toml"), run.changes, same_machine=True)
        assert spec.model.dtype == "bfloat16"
