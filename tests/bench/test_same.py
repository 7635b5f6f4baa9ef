"""Ways to compute, paired by seed."""

from pathlib import Path

import pytest

from bench.same import OTHERS, WAYS, Run, compared
from flowfleet.job.files import prepare_job


def result(after: float, seconds: float) -> dict[str, float]:
    gain = {"held_out_reward_before": 0.5, "held_out_reward_after": after, "improvement": after - 0.5}
    return {**gain, "training_seconds": seconds}


def test_differences_are_of_the_same_seeds() -> None:
    found = {
        "plain": {1: result(0.90, 100), 2: result(0.80, 100)},
        "only": {1: result(0.91, 50), 2: result(0.82, 50), 3: result(0.10, 50)},
        "merged": {2: result(0.70, 40)},
    }
    runs = {Run("tiny_ocr", way, seed, Path()): it for way, seeds in found.items() for seed, it in seeds.items()}
    plain, only, merged = compared(runs)
    assert (plain["difference"], plain["is_same"]) == (None, None)
    assert (only["difference"], only["is_same"]) == ("+0.015 (+0.010 … +0.020)", True)
    assert (merged["difference"], merged["is_same"], merged["gain_per_100_s"]) == ("-0.100", False, "+0.500")
    assert plain["before"] == "0.500 (0.500 … 0.500)"


@pytest.mark.parametrize(
    ("recipe", "way"), [*(("tiny_ocr", way) for way in WAYS), *(("tiny_ocr_full", way) for way in OTHERS)]
)
def test_every_way_is_a_job_of_the_recipe(recipe: str, way: str, tmp_path: Path) -> None:
    run = Run(recipe, way, 1, tmp_path, ("schedule.steps=2",))
    spec = prepare_job(Path(f"recipes/{recipe}.toml"), run.settings, same_machine=True)
    assert spec.model.dtype == ("float32" if way == "recipe" else "bfloat16")
    assert spec.schedule.steps == 2
