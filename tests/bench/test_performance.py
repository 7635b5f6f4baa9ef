"""Figures of a loop by hand-worked numbers, and the page from what benches print. One tiny loop runs for real."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import h200
from bench.h200 import Measurement, code_version, run_all, select, share_cores
from bench.learning.proof import seeds_after
from bench.performance import PAGE, RESULTS, figures_in, read_all, take
from bench.performance_goals import GOALS, summary
from bench.performance_tables import engine_of, loops, machine, parts, proofs, published
from bench.speed.gap import VARIANTS
from bench.speed.loop.figures import loop_figures, policy_version, rollout_busy_s
from docs.generate.markdown import outdated, rewrite

ROOT = Path(__file__).parents[2]


def row(step: float, update: float, publish: float, **more: float) -> dict[str, float | None]:
    return {"timing_s/step": step, "timing_s/update_actor": update, "timing_s/update_weights": publish, **more}


def test_a_loops_figures() -> None:
    """Two steps of 10 s that share 20 s of wall time in which the rollout worked for 16 s, so 8 s a step."""
    rows = [row(9.0, 6.0, 0.5, **{"timing_s/drain": 0.2}), row(11.0, 6.0, 0.5, **{"timing_s/drain": 0.4})]
    found = loop_figures(rows, images=40, gpus=2, busy={"rollout-0": 16.0}, window_s=20.0)
    assert found["images_per_gpu_s"] == pytest.approx(40 / 10 / 2)
    assert found["rollout_idle"] == pytest.approx(0.2)
    assert found["trainer_idle"] == pytest.approx(0.4)
    assert found["overlap"] == pytest.approx((8.0 + 6.0 + 0.5 - 10.0) / 6.0)
    assert found["published"] == {"drain": pytest.approx(0.3)}


def test_two_rollouts_and_no_overlap() -> None:
    """Each of two works for a third of the time; then the trainer for as long, and neither for a third."""
    found = loop_figures([row(9.0, 3.0, 0.0)], 8, 3, {"rollout-0": 3.0, "rollout-1": 3.0}, 9.0)
    assert found["rollout_busy"] == {"rollout-0": pytest.approx(1 / 3), "rollout-1": pytest.approx(1 / 3)}
    assert found["overlap"] == 0.0
    assert found["images_per_s"] == pytest.approx(8 / 9)


def test_a_replicas_counters() -> None:
    text = "\n".join(
        [
            'flowfleet_rollout_seconds_total{job="a",part="encode"} 1.5',
            'flowfleet_rollout_seconds_total{job="a",part="denoise"} 20.0',
            'flowfleet_rollout_seconds_total{job="a",part="publish"} 7.0',
            'flowfleet_rollout_seconds_created{job="a",part="denoise"} 1.7e+09',
            "flowfleet_rollout_policy_version 3.0",
        ]
    )
    assert rollout_busy_s(text) == 21.5
    assert policy_version(text) == 3
    assert policy_version("") == -1


def test_printed_lines_become_figures() -> None:
    printed = [
        "torch said hello",
        json.dumps({"bench": "gap", "mean": 1e-5}),
        "",
        "| rollout | mean |",
        "|---|---|",
        "| a | 1 |",
    ]
    assert figures_in(printed) == [{"bench": "gap", "mean": 1e-5}]
    table = ["| model | verified s |", "|---|---|", "| Qwen-Image, full | 0.5 |", "| Qwen-Image, LoRA r64 | 0.1 |"]
    assert [found["verified s"] for found in figures_in(table)] == ["0.5", "0.1"]


def measured(**rows: list[str]) -> dict[str, Any]:
    return {
        "machine": {"devices": "4 × GPU", "torch": "2.11.0"},
        "rows": {
            name.replace("_", "-"): {"outcome": "done in 3 s", "command": "bench.x", "gpus": 1, "printed": printed}
            for name, printed in rows.items()
        },
    }


def test_a_failed_row_replaces_nothing(tmp_path: Path) -> None:
    assert take(measured(gap=['{"bench": "gap", "mean": 1}']), tmp_path) == []
    failed = measured(gap=['{"bench": "gap", "mean": 2}'])
    failed["rows"]["gap"]["outcome"] = "failed with 1 after 2 s"
    assert "gap" in take(failed, tmp_path)[0]
    assert read_all(tmp_path)["gap"]["figures"] == [{"bench": "gap", "mean": 1}]


def test_the_summary_says_what_is_met(tmp_path: Path) -> None:
    def service(images: float, engine: str = "diffusers") -> list[str]:
        return [
            json.dumps({"bench": "rollout", "row": "bare", "images_per_s": 9.0}),
            json.dumps({"bench": "rollout", "row": "service", "images_per_s": images, "engine": engine}),
        ]

    publish = ["| model | verified s |", "|---|---|", "| Qwen-Image, full | 0.9 |", "| Qwen-Image, LoRA r64 | 0.4 |"]
    loop = {"bench": "loop", "settings": {"engine": "vllm-omni"}, "services": {"images_per_gpu_s": 1.4}}
    rollouts = {"rollout": service(2.9), "rollout_cfg": service(1.3), "rollout_omni": service(2.7, "vllm-omni")}
    take(measured(**rollouts, loop_lora=[json.dumps(loop)], publish=publish), tmp_path)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in summary(read_all(tmp_path)).splitlines()[2:]
    ]
    met = {(line[0], line[1]): (line[2], line[3], line[5]) for line in lines}
    assert met["1", "rollout, no CFG, bf16"] == ("diffusers", "2.90 images/s", "yes")
    assert met["1 (vLLM-Omni)", "rollout, no CFG, bf16"] == ("vllm-omni", "2.70 images/s", "no")
    assert met["2", "rollout, CFG 4"] == ("diffusers", "1.30 images/s", "no")
    assert met["4", "loop, LoRA, no CFG, 1 + 1 GPUs"] == ("vllm-omni", "1.40 images/GPU/s", "yes")
    assert met["7", "publish 41 GB, verified"] == ("–", "0.90 s", "no")
    assert met["8", "publish LoRA r64, verified"] == ("–", "0.40 s", "yes")
    assert met["9", "services / one process"] == ("–", "not measured", "–")


def test_the_page_is_made_of_the_results() -> None:
    assert outdated(ROOT / PAGE, parts(read_all(ROOT / RESULTS))) == []


def test_a_loop_just_measured_is_listed_without_its_machine() -> None:
    """The driver prints its rows so, next to what it says of the machine."""
    figures = json.loads((ROOT / RESULTS / "loop-base-h100.json").read_text())["figures"]
    speed = f"{figures[0]['services']['images_per_gpu_s']:.2f}"
    (row,) = loops({"loop-base-h100": {"figures": figures}}).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")][5] == speed


def test_weight_updates_are_listed_by_their_receivers(tmp_path: Path) -> None:
    head = "| model | trainer ranks | GB | sender s | verified s | GB/s |"
    one = [head, "|---|---|---|---|---|---|", "| full | 1 | 40.9 | 0.1 | 0.2 | 258 |"]
    three = [head.replace("| GB |", "| receivers | GB |"), "|---|", "| full | 1 | 3 | 40.9 | 0.3 | 0.4 | 102 |"]
    header = "| model | trainer ranks | receivers | GB | sender free s | verified again s |"
    killed = ["hashes are equal", header, "|---|", "| full | 1 | 3 | 40.9 | 0.5 | 0.6 |"]
    take(measured(publish=one, publish_3=three, publish_check_3=killed), tmp_path)
    assert published(read_all(tmp_path)).splitlines() == [
        "| model | trainer ranks | receivers | GB | sender s | verified s | GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| full | 1 | 1 | 40.9 | 0.1 | 0.2 | 258 |",
        "| full | 1 | 3 | 40.9 | 0.3 | 0.4 | 102 |",
        "",
        "| model | trainer ranks | receivers | GB | sender free s | verified again s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| full | 1 | 3 | 40.9 | 0.5 | 0.6 |",
    ]
    assert published({}) == "Not measured."


def test_a_variant_of_the_gap_has_its_engine() -> None:
    assert {name: engine_of(name) for name in VARIANTS} == {name: engine for name, (engine, _) in VARIANTS.items()}


def test_rows_say_which_code_they_measured(tmp_path: Path) -> None:
    at = {"devices": "4 × GPU", "torch": "2.11.0"}
    dirty = {**at, "commit": "abc1234", "dirty": True}
    rows: dict[str, Any] = {
        "gap": {"machine": at},
        "publish": {"machine": {**at, "commit": "abc1234", "dirty": False}},
        "rollout": {"machine": dirty},
        "rollout-cfg": {"machine": dirty},
    }
    assert machine(rows).splitlines() == [
        "- 4 × GPU, torch 2.11.0",
        "- 4 × GPU, torch 2.11.0, commit abc1234: publish",
        "- 4 × GPU, torch 2.11.0, commit abc1234 with uncommitted changes: rollout, rollout-cfg",
    ]


def test_the_version_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_version(tmp_path) == {}

    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *settings, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "file"
    file.write_text("1")
    git("init")
    assert code_version(tmp_path) == {}
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "results.json").write_text("untracked")
    found = code_version(tmp_path)
    assert head.startswith(found["commit"])
    assert found["dirty"] is False
    file.write_text("2")
    assert code_version(tmp_path) == {**found, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(tmp_path) == {}


def test_every_goal_is_a_row_of_the_driver() -> None:
    assert {goal.row for goal in GOALS} <= {measurement.name for measurement in h200.MEASUREMENTS}


def test_rows_are_chosen_by_stage_and_name() -> None:
    assert [row.name for row in select(["train", "rollout-fp8", "train"])] == ["train-lora-1", "rollout-fp8"]
    assert select([]) == [*h200.MEASUREMENTS]
    with pytest.raises(ValueError, match="nonsense"):
        select(["nonsense"])


def test_cores_are_shared_by_gpus() -> None:
    assert share_cores(range(8), ["0", "1", "2", "3"]) == {"0": [0, 1], "1": [2, 3], "2": [4, 5], "3": [6, 7]}
    assert share_cores([5], ["0", "1"]) == {"0": [5], "1": [5]}


def test_rows_run_side_by_side_and_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prints, one fails, one hangs and is ended, one needs more GPUs than there are."""
    (tmp_path / "fake.py").write_text(
        "import os, sys, time\nprint('{\"bench\": 1}', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "time.sleep(60) if 'hang' in sys.argv else None\nsys.exit('fail' in sys.argv)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    rows = [
        Measurement("good", "s", 2, 30.0, "fake"),
        Measurement("bad", "s", 1, 30.0, "fake fail"),
        Measurement("hangs", "s", 1, 1.0, "fake hang"),
        Measurement("large", "s", 3, 30.0, "fake"),
    ]
    done = run_all(rows, ["0", "1"], argparse.Namespace(tiny=False, out=out, work=work, cache=tmp_path, budget=60.0))
    outcomes = {run.row.name: run.outcome for run in done}
    assert outcomes["good"].startswith("done")
    assert outcomes["bad"].startswith("failed with 1")
    assert outcomes["hangs"].startswith("failed: not done")
    assert "large" not in outcomes
    written = json.loads((out / "results.json").read_text())
    assert set(written["machine"]) == set(h200.machine())
    kept = written["rows"]
    assert kept["good"]["printed"] == ['{"bench": 1} 0,1']
    assert (out / "logs.tar.gz").stat().st_size > 0


def test_a_budget_ends_what_runs_and_starts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.py").write_text("import time\nprint('| a |\\n|---|\\n| 1 |', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [Measurement(name, "s", 1, 30.0, "fake") for name in ("first", "second")]
    options = argparse.Namespace(tiny=False, out=tmp_path, work=tmp_path, cache=tmp_path, budget=1.0)
    (run,) = run_all(rows, ["0"], options)
    assert run.row.name == "first"
    assert run.outcome.startswith("failed: not done")
    assert "images/s" in h200.tables([run], tmp_path), "the tables' headings are there, without a row of what failed"
    assert "| 1 |" not in h200.tables([run], tmp_path)


def test_no_row_outlives_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[h200.Run] = []
    start = h200.start

    def then_end(*given: Any) -> h200.Run:
        started.append(start(*given))
        return started[0]

    def end(seconds: float) -> None:
        sys.exit("terminated")

    monkeypatch.setattr(h200, "start", then_end)
    monkeypatch.setattr("time.sleep", end)
    options = argparse.Namespace(tiny=False, out=tmp_path, work=tmp_path, cache=tmp_path, budget=60.0)
    with pytest.raises(SystemExit):
        run_all([Measurement("a", "s", 1, 30.0, "fake")], ["0"], options)
    assert started[0].process.poll() is not None


def test_seeds_are_read_from_the_page() -> None:
    frozen = "| [a](../recipes/a.toml), frozen | x | 1 | 0.1 |"
    page = f"{frozen}\n| [a](../recipes/a.toml) | x | 0.5 (0.4 … 0.6) | 0.9 (0.8 … 0.95) |"
    assert seeds_after("a", page) == (0.9, 0.8, 0.95)
    with pytest.raises(ValueError, match="seeds of b"):
        seeds_after("b", page)
    low, high = seeds_after("tiny_ocr", (ROOT / "docs/results.md").read_text())[1:]
    assert 0.0 < low < high < 1.0


@pytest.mark.parametrize(
    ("after", "told"), [(0.9244, "yes"), (0.8896, "yes"), (0.9262, "0.002 above"), (0.8701, "0.020 below")]
)
def test_a_proof_is_held_against_seeds_of_three_digits(after: float, told: str) -> None:
    figures = {
        "settings": {"engine": "vllm-omni", "seed": 2, "devices": ["cpu"]},
        "recipe": "tiny_ocr",
        "before": 0.6,
        "after": after,
        "curve": [[0, 0.6], [96, after]],
        "seeds": {"mean": 0.906, "low": 0.89, "high": 0.924},
    }
    line = proofs({"proof-full": {"figures": [figures]}}).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:4] == ["CPU", "2"]
    assert cells[6] == told


def test_a_page_without_places_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copy(ROOT / PAGE, page)
    rewrite(page, parts({}))
    page.write_text("nothing")
    with pytest.raises(ValueError, match="performance-machine"):
        rewrite(page, parts({}))


@pytest.mark.long
def test_a_tiny_loop_as_services_and_in_one_process() -> None:
    command = (
        "-m bench.speed.loop --tiny --images 8 --group-size 4 --batch-size 8 --micro-batch 4 --steps 2 --warm-up 1 "
        "--compare"
    )
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    for how in ("services", "one_process"):
        assert len(figures[how]["step_s_each"]) == 2
        assert figures[how]["seconds"]["update_actor"] > 0
    assert figures["ratio"] > 0
