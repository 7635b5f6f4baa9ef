"""The jobs of every algorithm on the small world of composition, and the choice among the sweep's."""

import json
from pathlib import Path

import pytest

from bench.learning.composition import ALGORITHMS, FACTORS, WINDOW, best_factor, own_settings, plan, sweep
from flowfleet.job.files import prepare_job

ROOT = Path(__file__).parents[3]
PARTIAL = [0.5, 0.7, 0.6]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def swept(directory: Path) -> None:
    for run in sweep(ALGORITHMS, directory):
        run.directory.mkdir(parents=True)
        factor = float(run.directory.name.rpartition("-")[2])
        summary = {"held_out_reward_after": PARTIAL[FACTORS.index(factor)]}
        (run.directory / "summary.json").write_text(json.dumps(summary))


def test_every_job_is_valid_and_makes_as_many_pictures(tmp_path: Path) -> None:
    swept(tmp_path)
    specs = {
        run.directory: prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
        for run in [*sweep(ALGORITHMS, tmp_path), *plan(ALGORITHMS, [1], tmp_path)]
    }
    assert len(specs) == 4 * len(ALGORITHMS)
    assert {(one.rollout.prompts_per_step, one.rollout.group_size, one.schedule.steps) for one in specs.values()} == {
        (12, 12, 30)
    }
    assert {Path(str(one.data.train)).name for one in specs.values()} == {"small_train.jsonl"}
    assert all(
        {"composition", "composition_judge"} <= set(one.rewards) and "ocr" not in one.rewards for one in specs.values()
    )
    assert {one.trainer.mode for folder, one in specs.items() if "full" in folder.name} == {"full"}


def test_flow_grpo_is_the_recipe_that_one_trains_by_hand(tmp_path: Path) -> None:
    run = next(run for run in sweep(ALGORITHMS, tmp_path) if run.directory.name == "ocr-1")
    ours = prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
    theirs = prepare_job(Path("recipes/composition_small_lora.toml"), same_machine=True)
    for part in ("model", "rollout", "algorithm", "trainer", "rewards"):
        assert getattr(ours, part) == getattr(theirs, part)


def test_an_algorithm_keeps_its_own_settings_and_half_the_steps_are_noisy() -> None:
    recipe = {
        "extends": "bases/tiny_signs.toml",
        "rollout": {"window": {"strategy": "fixed", "size": 3}},
        "algorithm": {"name": "flow_cps", "kl_gate": {"rewards": ["image_quality"]}},
        "rewards": {"ocr": {"weight": 1.0}, "image_quality": {"weight": 0.0}},
        "schedule": {"steps": 9},
    }
    assert own_settings(recipe) == {
        "rollout.window.strategy": "fixed",
        "rollout.window.size": WINDOW,
        "algorithm.name": "flow_cps",
        "algorithm.kl_gate.rewards": ["image_quality"],
        "rewards.image_quality.weight": 0.0,
    }


def test_the_reward_chooses_the_learning_rate(tmp_path: Path) -> None:
    one = ALGORITHMS[0]
    assert best_factor(one, tmp_path) is None
    with pytest.raises(ValueError, match="no sweep of ocr"):
        plan([one], [1], tmp_path)
    swept(tmp_path)
    assert best_factor(one, tmp_path) == FACTORS[1]
    runs = plan(ALGORITHMS, [1, 2], tmp_path)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert all("small_seen" in " ".join(run.changes) for run in runs)
    assert all("small_validation" in " ".join(run.changes) for run in sweep(ALGORITHMS, tmp_path))
