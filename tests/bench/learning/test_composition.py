"""The jobs of every algorithm on the small world of composition, and the choice of the learning rate."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.learning import composition
from bench.learning.composition import (
    ALGORITHMS,
    BATCH,
    EVERY,
    FACTORS,
    FIRST_SEED,
    JUDGE,
    PAIRS,
    REWARD,
    SAMPLES,
    SCORE,
    STEPS,
    TRAINED,
    Algorithm,
    Listed,
    best_factor,
    chosen_factors,
    make_first,
    page_part,
    place_of,
    read_best,
    reward_after,
    run_at,
    tried,
    tries,
)
from bench.learning.jobs import SMOOTH, WINDOW, as_changes, lacking, own_settings
from bench.learning.runs import Run
from flowfleet.demo.demos import WIDER, Made
from flowfleet.job.files import changed_job, prepare_job
from flowfleet.job.spec import JobSpec
from flowfleet.local.rewards import parse_reward
from recipes.tiny.pairs import PAINTER

ROOT = Path(__file__).parents[3]
PARTIAL = [0.5, 0.7, 0.6]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def leave(place: Path, reward: float) -> None:
    """What a run leaves that sampled nothing, with its held-out reward."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "summary.json").write_text(json.dumps({"held_out_reward_after": reward}))
    (place / "metrics.jsonl").write_text("")


def try_all(directory: Path) -> None:
    for one in ALGORITHMS:
        for factor, reward in zip(FACTORS, PARTIAL, strict=True):
            leave(place_of(one, factor, FIRST_SEED, directory), reward)


def all_tries(directory: Path) -> list[Run]:
    return [run for one in ALGORITHMS for run in tries(one, directory)]


def all_best(seeds: Sequence[int], directory: Path) -> list[Run]:
    return [
        run_at(one, factor, seed, directory)
        for seed in seeds
        for one, factor in chosen_factors(ALGORITHMS, directory).items()
    ]


def the_run(name: str, directory: Path) -> Run:
    return next(run for run in all_tries(directory) if run.directory.name == name)


def spec_of(run: Run) -> JobSpec:
    return prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)


def test_every_job_is_valid_and_makes_as_many_pictures(tmp_path: Path) -> None:
    try_all(tmp_path)
    runs = [*all_tries(tmp_path), *all_best([2], tmp_path)]
    specs = {run.directory: spec_of(run) for run in runs}
    assert len(specs) == 4 * len(ALGORITHMS)
    assert {(one.samples_per_step, one.schedule.steps) for one in specs.values()} == {(SAMPLES, STEPS)}
    groups = {one.algorithm.name: one.rollout.group_size for one in specs.values()}
    assert groups.pop("dpo") == 2
    assert groups.pop("diffusion_opd") == 1
    assert set(groups.values()) == {12}
    previewed = [one.rollout.preview.keep for one in specs.values() if one.rollout.preview.keep]
    assert previewed == [6] * 4
    data = {Path(source.path).name: one.algorithm.name for one in specs.values() for source in one.data.each}
    assert data.keys() == {"small_train.jsonl", "preferences.jsonl"}
    assert data["preferences.jsonl"] == "dpo"
    held_out = {Path(str(source.validation)).name for one in specs.values() for source in one.data.held_out}
    assert held_out == {"small_seen.jsonl"}
    assert {(one.rollout.height, one.rollout.batch_size, one.trainer.micro_batch_size) for one in specs.values()} == {
        (64, BATCH, BATCH)
    }
    once = {one.algorithm.name for one in specs.values() if one.trainer.updates_per_step != 2}
    assert once == {"refl", "srpo"}, "which are on-policy"
    assert all(
        {"composition", "composition_judge"} <= set(one.rewards) and "ocr" not in one.rewards for one in specs.values()
    )
    assert {one.trainer.mode for folder, one in specs.items() if "full" in folder.name} == {"full"}


def test_flow_grpo_is_the_recipe_that_one_trains_by_hand(tmp_path: Path) -> None:
    ours = spec_of(the_run("ocr-1-1", tmp_path))
    theirs = prepare_job(Path("recipes/composition_small_lora.toml"), same_machine=True)
    assert (ours.model, ours.algorithm, ours.rewards) == (theirs.model, theirs.algorithm, theirs.rewards)
    assert ours.rollout == theirs.rollout.model_copy(update={"batch_size": BATCH})
    assert ours.trainer == theirs.trainer.model_copy(update={"micro_batch_size": BATCH})


def test_an_algorithm_keeps_its_own_settings_and_half_the_steps_are_noisy() -> None:
    recipe = {
        "extends": "bases/tiny_signs.toml",
        "rollout": {"window": {"strategy": "fixed", "size": 3}, "group_size": 1, "batch_size": 48},
        "algorithm": {
            "name": "flow_cps",
            "kl_gate": {"rewards": ["image_quality"]},
            "teachers": {"words": {"adapter": "job:1"}},
        },
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


@pytest.mark.parametrize("key", ["refl", "srpo"])
def test_losses_on_gradients_follow_the_smooth_score_while_the_reward_watches(key: str, tmp_path: Path) -> None:
    run = the_run(f"{key}-1-1", tmp_path)
    spec = prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
    assert {name: part.weight for name, part in spec.rewards.items()} == {SMOOTH: 1.0, REWARD: 0.0, JUDGE: 0.0}
    assert set(spec.reward_services) == {parse_reward(given).name for given in run.rewards}
    summary = {"held_out_reward_after": 0.9, "watched": {REWARD: {"after": 0.4}, JUDGE: {"after": 0.3}}}
    assert reward_after(summary) == 0.4
    assert reward_after({"held_out_reward_after": 0.9, "watched": {JUDGE: {"after": 0.3}}}) == 0.9


def test_the_reward_of_training_chooses_the_learning_rate(tmp_path: Path) -> None:
    one = ALGORITHMS[0]
    assert best_factor(one, tmp_path) is None
    with pytest.raises(ValueError, match=rf"composition train --algorithms ocr --seeds 1 --directory {tmp_path}`"):
        chosen_factors([one], tmp_path)
    try_all(tmp_path)
    assert best_factor(one, tmp_path) == FACTORS[1], "of runs without pictures the held-out one"
    for factor, early, late in zip(FACTORS, (0.9, 0.1, 0.1), (0.2, 0.4, 0.6), strict=True):
        rows = [{"step": step, TRAINED: early if step < 20 else late} for step in (*range(20 + EVERY), 20 + EVERY)]
        rows[-1][TRAINED] = None  # the last validation's row has no pictures
        (place_of(one, factor, 1, tmp_path) / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert tried(one, tmp_path) == pytest.approx({0.5: 0.2, 1.0: 0.4, 2.0: 0.6})
    assert best_factor(one, tmp_path) == 2.0
    assert all_best([1], tmp_path)[0] in tries(one, tmp_path), "the first seed's run is one of the table"


def test_settings_survive_the_command_line() -> None:
    settings = {"data": {"sources": [{"name": "a", "path": 'it "is" \\ here'}, {"name": "b"}]}, "trainer.lora.rank": 32}
    job: dict[str, Any] = {"data": {"train": "replaced"}, "trainer": {"lora": {"alpha": 64.0}}}
    changed_job(job, as_changes(settings), [])
    assert job == {"data": settings["data"], "trainer": {"lora": {"alpha": 64.0, "rank": 32}}}


def test_each_teacher_has_half_of_the_prompts(tmp_path: Path) -> None:
    try_all(tmp_path)
    runs = {run.directory.name: run for run in all_best([1, 2], tmp_path)}
    spec = spec_of(runs["diffusion_opd-1-2"])
    taught = {part.sources: part.adapter for part in spec.algorithm.teachers.values()}
    assert taught == {(key,): f"{tmp_path}/{key}-1-2/model" for key in ("awm", "ocr")}
    assert {(source.name, source.weight) for source in spec.data.each} == {("awm", 1.0), ("ocr", 1.0)}
    teachers = [spec_of(runs[f"{key}-1-2"]) for key in ("awm", "ocr")]
    assert all(teacher.trainer.lora == spec.trainer.lora for teacher in teachers)


def test_what_an_algorithm_needs_first_is_named_with_its_command(tmp_path: Path) -> None:
    runs = {run.directory.name: run for run in all_tries(tmp_path)}
    assert {run.directory.name for run in runs.values() if lacking(run)} == {
        f"{key}-{factor:g}-1" for key in ("dpo", "diffusion_opd") for factor in FACTORS
    }
    (tmp_path / "awm-1-1" / "model").mkdir(parents=True)
    leave(tmp_path / "awm-1-1", 0.5)
    assert lacking(runs["diffusion_opd-1-1"]).endswith(
        f"composition train --algorithms ocr --seeds 1 --directory {tmp_path}`"
    )
    (tmp_path / "ocr-1-1" / "model").mkdir(parents=True)
    assert lacking(runs["diffusion_opd-1-1"]), "it is still written"
    (tmp_path / "ocr-1-1" / "summary.json").write_text("{}")
    assert lacking(runs["diffusion_opd-1-1"]) == ""


def test_a_data_set_holds_as_many_pairs_as_a_job_reads(tmp_path: Path) -> None:
    run = the_run("dpo-1-1", tmp_path)
    run = replace(run, changes=(*run.changes, "schedule.steps=2"))
    assert f"--model {ROOT}/recipes/composition/model --output {tmp_path}/preferences --pairs 144`" in lacking(run)
    (tmp_path / "preferences").mkdir()
    (tmp_path / PAIRS).write_text("{}\n" * 143)
    assert lacking(run).startswith(f"the job needs 144 pairs and {tmp_path}/preferences/preferences.jsonl has 143: ")
    (tmp_path / PAIRS).write_text("{}\n" * 144)
    (tmp_path / "preferences" / PAINTER).write_text(f"{tmp_path}/other\n")
    assert lacking(run).startswith(f"{tmp_path}/other painted the pairs in {tmp_path}/preferences: remove the folder")
    (tmp_path / "preferences" / PAINTER).write_text(f"{ROOT}/recipes/composition/model\n")
    assert lacking(run) == ""


def test_teachers_without_models_are_to_be_trained_again(tmp_path: Path) -> None:
    run = the_run("diffusion_opd-1-1", tmp_path)
    for key in ("awm", "ocr"):
        (tmp_path / f"{key}-1-1").mkdir()
    (tmp_path / "ocr-1-1" / "summary.json").write_text("{}")
    assert f"their runs kept no model, so remove {tmp_path}/ocr-1-1, then run" in lacking(run)
    run.directory.mkdir(parents=True)
    (run.directory / "summary.json").write_text("{}")
    assert lacking(run) == ""


BASE = ("--model", "recipes/composition/model")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "bench.learning.composition", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_settings_that_make_no_job_are_named_without_a_traceback(tmp_path: Path) -> None:
    done = command(
        "train", "--no-page", "--directory", str(tmp_path), "--algorithms", "ocr", "--set", "trainer.lor=1", *BASE
    )
    assert done.returncode == 1
    assert "trainer.lor" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_page_shows_every_algorithm(tmp_path: Path) -> None:
    assert f"{tmp_path} holds no finished run" in command("page", "--no-page", "--directory", str(tmp_path)).stderr
    for one in ALGORITHMS[:2]:
        finished(one, 1.0, 1, [0.4, 0.9], tmp_path)
    done = command("page", "--no-page", "--seeds", "1", "--algorithms", "awm", "--directory", str(tmp_path))
    assert done.returncode == 0
    assert all(f"| {one.title} |" in done.stdout for one in ALGORITHMS[:2])


def options_of(*arguments: str) -> Namespace:
    return composition._parser().parse_args([*arguments, "--model", "recipes/composition/model"])


def end(runs: Sequence[Run]) -> set[str]:
    """Leaves what they would, with the greatest reward at the recipe's own rate; their names."""
    for run in runs:
        leave(run.directory, 0.6 if run.directory.name.split("-")[1] == "1" else 0.5)
        if run.keeps_model:
            (run.directory / "model").mkdir()
    return {run.directory.name for run in runs}


def test_seeds_follow_the_first_ones_rates_and_students_their_teachers(tmp_path: Path) -> None:
    chosen = [one for one in ALGORITHMS if one.key in ("ocr", "awm", "crd", "diffusion_opd", "dpo")]
    listed = Listed(options_of("train", "--seeds", "1", "2", "--directory", str(tmp_path)), chosen)

    def next_ones() -> list[Run]:
        return [run for run in listed({}) if not run.is_done]

    def rates(*keys: str) -> list[str]:
        return [f"{key}-{factor:g}-1" for key in keys for factor in FACTORS]

    assert [run.directory.name for run in next_ones()] == rates("ocr", "awm", "crd"), "teachers first"
    assert end([run for run in next_ones() if run.keeps_model]) == set(rates("ocr", "awm")), "for others to learn from"
    assert [run.directory.name for run in next_ones()] == ["ocr-1-2", "awm-1-2", *rates("diffusion_opd", "crd")]
    end([run for run in next_ones() if run.directory.name in rates("diffusion_opd")])
    assert "diffusion_opd-1-2" not in {run.directory.name for run in next_ones()}, "its own seed's teachers train"
    end([run for run in next_ones() if run.keeps_model])
    assert end(next_ones()) == {"diffusion_opd-1-2", *rates("crd")}
    assert end(next_ones()) == {"crd-1-2"}
    assert next_ones() == []
    assert {run.directory.name for run in listed.every() if not run.is_done} == set(rates("dpo"))


def test_mistakes_are_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "make_first", lambda *_: pytest.fail("the base takes minutes"))
    mistaken = ["train", "--no-page", "--directory", str(tmp_path), "--algorithms", "ocr", "--set", "trainer.lor=1"]
    monkeypatch.setattr(sys, "argv", ["composition", *mistaken])
    with pytest.raises(SystemExit, match=r"trainer\.lor: unknown setting"):
        composition.main()
    of_students = [*mistaken[:-1], 'trainer.mode="full"', "--algorithms", "ocr", "awm", "diffusion_opd"]
    monkeypatch.setattr(sys, "argv", ["composition", *of_students])
    with pytest.raises(SystemExit, match="diffusion_opd compares adapters"):
        composition.main()


def test_runs_wait_for_no_rate_that_failed(tmp_path: Path) -> None:
    listed = Listed(options_of("train", "--seeds", "2", "--directory", str(tmp_path)), ALGORITHMS[:1])
    *good, bad = listed({})
    end(good)
    assert listed({}) == [*good, bad]
    assert [run.directory.name for run in listed({bad: "it diverged"})] == [
        "ocr-0.5-1",
        "ocr-1-1",
        "ocr-2-1",
        "ocr-1-2",
    ]


def test_what_is_missing_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(Made, "make", lambda self, say: made.append(self.command))
    options = options_of("train", "--directory", str(tmp_path))
    make_first(options, ALGORITHMS[:1], Console(quiet=True))
    assert made == [], "a base of one's own is there"
    with pytest.raises(ValueError, match="give --gpus 0, or --model"):
        make_first(composition._parser().parse_args(["train"]), ALGORITHMS, Console(quiet=True))
    with pytest.raises(ValueError, match="name the base by --model"):
        make_first(options_of("train", "--set", "model.path=x"), ALGORITHMS, Console(quiet=True))
    make_first(composition._parser().parse_args(["train", "--gpus", "0"]), ALGORITHMS, Console(quiet=True))
    assert made == [
        WIDER.command,
        f"recipes.composition.base.preferences --world small --model {WIDER.path} --pairs 6912",
    ]


def finished(one: Algorithm, factor: float, seed: int, judged: list[float], directory: Path) -> None:
    """What a run leaves, with made-up scores of the judge and a constant reward."""
    settings = spec_of(the_run(f"{one.key}-1-1", directory)).model_dump(mode="json")
    before, *_, after = judged
    summary = {
        "held_out_reward_after": 0.5 + factor / 100,
        "watched": {JUDGE: {"before": before, "after": after, "bootstrap_ci95": [after - before - 0.05, 1.0]}},
        "edge_density_before": 30.0,
        "edge_density_after": 30.3,
        "colour_entropy_before": 2.0,
        "colour_entropy_after": 1.96,
        "settings": settings,
    }
    place = place_of(one, factor, seed, directory)
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": step, SCORE: score, "timing_s/gen": 4.0} for step, score in enumerate(judged)]
    (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_table_is_of_the_best_rates_finished_runs_and_counts_previews(tmp_path: Path) -> None:
    flow_grpo, awm, previews = (next(one for one in ALGORITHMS if one.key == key) for key in ("ocr", "awm", "previews"))
    for one in (flow_grpo, previews):
        finished(one, 0.5, 1, [0.3, 0.3, 0.3], tmp_path)
        finished(one, 2.0, 1, [0.3, 0.5, 0.9], tmp_path)
    place_of(flow_grpo, 2.0, 2, tmp_path).mkdir()  # it has only begun
    place_of(awm, 1.0, 1, tmp_path).mkdir()
    results = read_best([1, 2], tmp_path)
    assert {one.key: len(runs) for one, runs in results.items()} == {"ocr": 1, "previews": 1}
    text = page_part(results, {flow_grpo: {0.5: 0.61, 1.0: 0.72}, previews: {}})
    assert "| 6.0e-04, of 2 |" in text
    # pictures of a step: 12 groups of 12, and with previews 6 more of each; 0.4 is half way through a step, 0.5 its end
    assert "| 0.300 | 0.900 | +0.600 | ≥ +0.550 | 0.900 | 0.520 | 72 | 144 | 2 | +1.0 % | -2.0 % |" in text
    assert "| 0.300 | 0.900 | +0.600 | ≥ +0.550 | 0.900 | 0.520 | 108 | 216 | 2 | +1.0 % | -2.0 % |" in text
    assert text.endswith("| Flow-GRPO | 0.610 | 0.720 | – |")
