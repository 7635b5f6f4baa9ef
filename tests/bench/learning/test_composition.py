"""The jobs of every algorithm on the small world of composition, and the choice among the sweep's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.learning.composition import (
    ALGORITHMS,
    FACTORS,
    JUDGE,
    SCORE,
    WINDOW,
    Algorithm,
    best_factor,
    own_settings,
    page_part,
    plan,
    sweep,
)
from bench.learning.results import read_all
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
    previewed = [one.rollout.preview.keep for one in specs.values() if one.rollout.preview.keep]
    assert previewed == [6] * 4
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
    with pytest.raises(ValueError, match=rf"composition sweep --algorithms ocr --directory {tmp_path}`"):
        plan([one], [1], tmp_path)
    swept(tmp_path)
    assert best_factor(one, tmp_path) == FACTORS[1]
    runs = plan(ALGORITHMS, [1, 2], tmp_path)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert all("small_seen" in " ".join(run.changes) for run in runs)
    assert all("small_validation" in " ".join(run.changes) for run in sweep(ALGORITHMS, tmp_path))


def test_without_a_sweep_the_command_says_what_to_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.learning.composition", "runs", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"{tmp_path} has no finished sweep of {len(ALGORITHMS)} algorithms: first run `python"
    )


def finished(directory: Path, algorithm: Algorithm, judged: list[float]) -> None:
    """What a run leaves, with made-up scores of the judge and a constant reward."""
    (run,) = (run for run in sweep([algorithm], directory) if run.directory.name.endswith("-1"))
    settings = prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True).model_dump(mode="json")
    before, *_, after = judged
    summary = {
        "held_out_reward_after": 0.5,
        "watched": {JUDGE: {"before": before, "after": after, "bootstrap_ci95": [after - before - 0.05, 1.0]}},
        "edge_density_before": 30.0,
        "edge_density_after": 30.3,
        "colour_entropy_before": 2.0,
        "colour_entropy_after": 1.96,
        "settings": settings,
    }
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": step, SCORE: score, "timing_s/gen": 4.0} for step, score in enumerate(judged)]
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_table_is_of_finished_runs_and_counts_previews(tmp_path: Path) -> None:
    chosen = [one for one in ALGORITHMS if one.key in ("ocr", "previews", "awm")]
    for one in chosen[:1] + chosen[2:]:
        finished(tmp_path / f"{one.key}-1", one, [0.4, 0.6, 0.9])
    (tmp_path / f"{chosen[0].key}-2").mkdir()  # it has only begun
    (tmp_path / f"{chosen[1].key}-1").mkdir()
    results = read_all(chosen, [1, 2], tmp_path, SCORE)
    assert {one.key: len(runs) for one, runs in results.items()} == {"ocr": 1, "previews": 1}
    text = page_part(results, {chosen[0]: {0.5: 0.61, 1.0: 0.72}, chosen[1]: {}})
    # pictures of a step: 12 groups of 12, and with previews 6 more of each; 0.5 is half way through a step, 0.6 its end
    assert "| 0.400 | 0.900 | +0.500 | ≥ +0.450 | 0.900 | 0.500 | 72 | 144 | 2 | +1.0 % | -2.0 % |" in text
    assert "| 0.400 | 0.900 | +0.500 | ≥ +0.450 | 0.900 | 0.500 | 108 | 216 | 2 | +1.0 % | -2.0 % |" in text
    assert text.endswith("| Flow-GRPO | 0.610 | 0.720 | – |")
