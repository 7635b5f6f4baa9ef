"""The demo itself, on a short job: real processes from start to end."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from flowfleet.demo.run import run_demo
from flowfleet.local.stack import StateDir

ROOT = Path(__file__).parents[3]


def test_a_short_demo_leaves_everything_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prompts = tmp_path / "held_out.txt"
    lines = (ROOT / "recipes/tiny/prompts/validation.txt").read_text().splitlines()[:5]
    prompts.write_text("\n".join(lines))
    changes = ["schedule.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=3", f"data.validation={prompts}"]
    changes += ["trainer.threads=1", "seed=3"]
    text = io.StringIO()
    directory = tmp_path / "demo"

    summary = run_demo(Path("recipes/tiny_ocr.toml"), directory, changes, Console(file=text, width=200))

    assert (summary["samples_trained"], summary["samples_dropped"], summary["seed"]) == (6, 0, 3)
    assert summary["held_out_prompts"] == 5
    assert 0 < summary["training_seconds"] < summary["total_seconds"]
    assert json.loads((directory / "summary.json").read_text()) == summary
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert "actor/loss" in rows[0]
    assert {path.name for path in directory.iterdir()} >= {"reward_curve.png", "before_after.png", "metrics.jsonl"}
    with safe_open(directory / "model/pytorch_lora_weights.safetensors", "pt") as adapter:
        assert all(name.startswith("transformer.") for name in adapter.keys())  # noqa: SIM118
    assert "step 1/1" in text.getvalue()
    assert str(directory / "summary.json") in text.getvalue()
    assert StateDir(directory / "stack").read() is None


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(ValueError, match="holds something else than a demo"):
        run_demo(ROOT / "recipes/tiny_ocr.toml", tmp_path, [], Console(file=io.StringIO()))

    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_mistake_in_the_job_is_found_before_the_directory_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "demo"

    with pytest.raises(ValueError, match=r"did you mean schedule\.steps"):
        run_demo(ROOT / "recipes/tiny_ocr.toml", directory, ["schedule.stpes=1"], Console(file=io.StringIO()))

    assert not directory.exists()
