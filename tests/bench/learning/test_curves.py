"""What docs/results.md is made of: figures by hand-worked numbers, and the page's tables from finished runs. The runs
themselves are tested as the demo's."""

import argparse
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from bench.learning import curves as learning
from bench.learning.curves import ENTRIES, parts, plan, teachers
from bench.learning.results import (
    Point,
    Result,
    first_crossing,
    merged,
    noise_of,
    points_of,
    previewed,
    reached,
    read_all,
    read_result,
    settings_row,
    spread,
)
from bench.learning.runs import Place, Run, add_options, core_groups, places, report, train_all
from flowfleet.job.files import prepare_job

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, 0.6), (96, 0.7), (192, 0.9)], 96 + 96 * 0.75),
        ([(0, 0.6), (96, 0.85)], 96),
        ([(0, 0.9), (96, 0.7)], 0),
        ([(0, 0.5), (96, 0.87), (192, 0.8), (288, 0.95)], 96 * 0.35 / 0.37),  # the first time counts
        ([(0, 0.6), (96, 0.84)], None),
        ([], None),
    ],
)
def test_the_first_crossing_is_linear_between_validations(
    points: list[tuple[float, float]], expected: float | None
) -> None:
    assert first_crossing(points, 0.85) == (None if expected is None else pytest.approx(expected))


def test_a_validation_comes_after_the_steps_before_it_and_waits_do_not_count() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 2, "val/reward": 0.9},
        {"step": 0, "val/reward": 0.5, "timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 50.0},
        {"step": 1, "val/reward": None, "timing_s/gen": 4.0, "timing_s/train": 60.0},
    ]
    assert points_of(rows, 96) == [Point(0, 0.0, 0.5), Point(192, 7.0, 0.9)]


def test_staleness_is_the_mean_over_training(tmp_path: Path) -> None:
    lag = "training/off_policy/trajectory_staleness/mean"
    rows = [{"step": 0, lag: 0.0}, {"step": 1, lag: 1.5}, {"step": 2, "val/reward": 0.9}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"rollout": {"prompts_per_step": 12, "group_size": 12}}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings}))
    assert read_result(tmp_path).staleness == 0.75


def test_how_seeds_are_put_together() -> None:
    assert spread([0.5, 0.7, 0.9], ".2f") == "0.70 (0.50 … 0.90)"
    assert spread([0.5], "+.1f") == "+0.5"
    assert reached([1000.0, 1400.0]) == "1,200"
    assert reached([100.0, None, 300.0]) == "200 (2 of 3 seeds)"
    assert reached([None, None]) == "–"


def test_a_figure_that_is_not_known_has_no_change() -> None:
    summary = {"edge_density_before": 20.0, "edge_density_after": 21.0}
    assert Result(summary, []).change("edge_density") == pytest.approx(5.0)
    assert Result(summary | {"edge_density_after": None}, []).change("edge_density") is None


def test_runs_are_planned_seed_after_seed_with_one_control_of_each_suite() -> None:
    runs = plan(ENTRIES, [1, 2, 3], Path("runs"), every=2)

    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len({run.directory for run in runs}) == len(runs) == 23 * 3 + 3
    controls = [run for run in runs if any("optimizer.lr" in change for change in run.changes)]
    assert [run.directory.name for run in controls] == [
        "tiny_ocr_control-1",
        "tiny_video_control-1",
        "tiny_gspo_control-1",
    ]


def test_teachers_are_trained_first_and_named_to_their_students() -> None:
    trained = teachers(ENTRIES, [1, 2], Path("/runs"))
    assert [(run.recipe, run.seed, run.keeps_model) for run in trained] == [
        (recipe, seed, True) for seed in (1, 2) for recipe in ("tiny_ocr", "tiny_guarded")
    ]
    (student,) = [run for run in plan(ENTRIES, [2], Path("/runs"), every=2) if run.recipe == "tiny_diffusion_opd"]
    assert f"algorithm.teachers.words.adapter={trained[2].directory}/model" in student.changes
    assert f"algorithm.teachers.small.adapter={trained[3].directory}/model" in student.changes


def test_previews_count_as_pictures() -> None:
    assert previewed({"group_size": 12}) == previewed({"group_size": 12, "preview": {"keep": None}}) == 0
    assert previewed({"group_size": 12, "preview": {"keep": 6, "num_inference_steps": 3}}) == 6


def test_rows_of_recipes_without_runs_stay() -> None:
    old = "| recipe | lr |\n| --- | --- |\n| a | 1 |\n| b | 2 |"
    new = "| recipe | lr |\n| --- | --- |\n| b | 3 |\n| c | 4 |"
    assert merged(old, new).splitlines()[2:] == ["| a | 1 |", "| b | 3 |", "| c | 4 |"]
    assert merged("", new) == new


def test_core_groups_are_disjoint() -> None:
    assert core_groups([4, 5, 6, 7, 9]) == [(4, 5), (6, 7)]
    assert core_groups([3]) == [(3,)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of runs, which a script stands in for: it fails for recipes named `bad`."""
    commands: list[list[str]] = []
    script = (
        "import os, pathlib, sys; recipe, seed, directory = sys.argv[2:5]\n"
        "print('about to train', os.environ['OMP_NUM_THREADS'], repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
        "if recipe == 'bad': raise SystemExit('no such setting')\n"
        "path = pathlib.Path(directory); path.mkdir(parents=True); (path / 'summary.json').write_text('{}')\n"
    )
    original = subprocess.run

    def stand_in(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return original([sys.executable, "-c", script, *command[3:]], **options)

    monkeypatch.setattr("bench.learning.runs.subprocess.run", stand_in)
    return commands


def test_a_failed_run_is_told_and_stops_no_other(recorded: list[list[str]], tmp_path: Path) -> None:
    bad, good, kept = (Run(name, 1, tmp_path / f"{name}-1", ("a.b=1",)) for name in ("bad", "good", "kept"))
    kept.directory.mkdir()
    (kept.directory / "summary.json").write_text("{}")

    errors = train_all(lambda _: [bad, good, kept], [Place((0, 1), "3")], 1000.0, Console(quiet=True))

    assert list(errors) == [bad]
    assert "no such setting" in errors[bad]
    assert "about to train 2 '3'" in errors[bad]
    assert good.is_done
    assert len(recorded) == 2
    assert recorded[1][3:7] == ["--only", "good", "1", str(good.directory)]
    assert recorded[1][-2:] == ["--set", "a.b=1"]


def test_nothing_is_started_near_the_end_of_the_budget(recorded: list[list[str]], tmp_path: Path) -> None:
    started = time.monotonic()
    assert (
        train_all(lambda _: [Run("good", 1, tmp_path / "good-1")], [Place((0,), "")], 150.0, Console(quiet=True)) == {}
    )
    assert recorded == []
    assert time.monotonic() - started < 5.0


def test_what_an_ended_run_makes_possible_is_trained_too(recorded: list[list[str]], tmp_path: Path) -> None:
    teacher, student = (Run("good", 1, tmp_path / name) for name in ("teacher-1", "student-1"))
    listed = train_all(
        lambda _: [student, teacher] if teacher.is_done else [teacher],
        [Place((0,), "")] * 2,
        1000.0,
        Console(quiet=True),
    )
    assert listed == {}
    assert [command[6] for command in recorded] == [str(teacher.directory), str(student.directory)]


def test_runs_share_cores_and_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert places(parser.parse_args(["--parallel", "3", "--gpus", "0,1"])) == [
        Place((0, 1), "0"),
        Place((2, 3), "1"),
        Place((4, 5), "0"),
    ]
    assert places(parser.parse_args(["--parallel", "1", "--cores-per-run", "4"])) == [Place((0, 1, 2, 3), "")]
    assert len(places(parser.parse_args(["--parallel", "8", "--cores-per-run", "1"]))) == 8
    with pytest.raises(SystemExit, match="4 runs of 2 cores find room here"):
        places(parser.parse_args(["--parallel", "5"]))
    for text in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--parallel", text])


def test_the_end_of_a_benchmark_names_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    runs = [Run("a", seed, tmp_path / f"a-{seed}") for seed in (1, 2, 3)]
    runs[0].directory.mkdir()
    (runs[0].directory / "summary.json").write_text("{}")
    out = io.StringIO()
    assert report(runs, {runs[2]: "no such setting"}, Console(file=out)) == 1
    assert f"not done: {tmp_path.name}/a-2\n" in out.getvalue()
    assert f"{runs[2].directory}: no such setting\n" in out.getvalue()
    out = io.StringIO()
    assert report(runs[:1], {}, Console(file=out)) == 0
    assert out.getvalue() == ""


def test_every_recipe_of_the_tables_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = {}
    for entry in ENTRIES:
        settings = prepare_job(Path(f"recipes/{entry.recipe}.toml"), [], same_machine=True).model_dump(mode="json")
        row = settings_row(entry.recipe, settings)
        assert all(row)
        shown[entry.recipe] = (row, noise_of(settings))
    assert shown["tiny_ocr"][0][1:4] == ["LoRA of rank 32", "6e-4", "2"]
    assert shown["tiny_ocr"][1] == "sde 0.7: 1 to 3, of 6"
    assert shown["tiny_dpo"][1] == "none"
    assert shown["tiny_mix_grpo"][1].endswith("2 in 1 to 4, 1 on after 3 training steps, of 6")
    assert "1 at random in 1 to 3" in shown["tiny_temp_flow_grpo"][1]
    assert "KL where image_quality doubts, to the policy of every 3 training steps" in shown["tiny_gardo"][0][-1]


def finished(directory: Path, recipe: str, seed: int, rewards: list[float]) -> None:
    """What a run of the recipe leaves, with made-up rewards."""
    settings = prepare_job(Path(f"recipes/{recipe}.toml"), [f"seed={seed}"], same_machine=True)
    summary = {
        "held_out_reward_before": rewards[0],
        "held_out_reward_after": rewards[-1],
        "improvement": rewards[-1] - rewards[0],
        "bootstrap_ci95": [rewards[-1] - rewards[0] - 0.05, rewards[-1] - rewards[0] + 0.05],
        "edge_density_before": 30.0,
        "edge_density_after": 30.3,
        "colour_entropy_before": 2.0,
        "colour_entropy_after": 1.96,
        "settings": settings.model_dump(mode="json"),
    }
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": step, "val/reward": reward, "timing_s/gen": 4.0} for step, reward in enumerate(rewards)]
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_page_is_made_of_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page, runs = tmp_path / "docs" / "results.md", tmp_path / "runs"
    page.parent.mkdir()
    shutil.copy(ROOT / "docs/results.md", page)
    finished(runs / "tiny_ocr-1", "tiny_ocr", 1, [0.6, 0.8, 0.9])
    finished(runs / "tiny_ocr-2", "tiny_ocr", 2, [0.6, 0.7, 0.8])
    finished(runs / "tiny_ocr_control-1", "tiny_ocr", 1, [0.6, 0.6, 0.6])
    finished(runs / "tiny_video_nft-1", "tiny_video_nft", 1, [0.6, 0.65, 0.7])
    monkeypatch.setattr(
        sys, "argv", ["learning", "--table-only", "--directory", str(runs), "--page", str(page), "--seeds", "1", "2"]
    )

    assert learning.main() == 0

    text = page.read_text()
    assert (
        "| [tiny_ocr](../recipes/tiny_ocr.toml) | Flow-GRPO | 0.600 (0.600 … 0.600) | 0.850 (0.800 … 0.900) |" in text
    )
    assert "| +0.250 (+0.200 … +0.300) | ≥ +0.150 | 144 (1 of 2 seeds) | 6 (1 of 2 seeds) | +1.0 % | -2.0 % |" in text
    assert "| [tiny_ocr](../recipes/tiny_ocr.toml), frozen | Flow-GRPO | 0.600 | 0.600 |" in text
    assert "| [tiny_video_nft](../recipes/tiny_video_nft.toml) | DiffusionNFT | 0.600 | 0.700 |" in text
    for name in ("learning_algorithms.png", "learning_video.png"):
        with Image.open(page.parent / "images" / name) as picture:
            assert min(picture.size) > 200
    assert set(parts(read_all(ENTRIES, [1, 2], runs))) == {"learning-signs", "learning-videos", "learning-settings"}
