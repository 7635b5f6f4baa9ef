"""Which demo a machine gets, and what is there or made before it starts."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfleet.cli.main import app
from flowfleet.demo import demos, run
from flowfleet.demo.demos import DEMOS, Demo, Made
from flowfleet.hardware import devices
from flowfleet.job.files import prepare_job
from recipes.composition.atlas import FOLDER, default_folder

ROOT = Path(__file__).parents[3]
MAKER = "tests.flowfleet.demo.maker"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("cpu", "composition_small_awm"), ("npu", "composition_small_awm"), ("cuda", "composition_wide_awm")],
)
def test_the_device_decides_which_composition_is_shown(kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pick_kind", lambda: kind)
    demo = DEMOS["composition"].here()
    assert demo.recipe == Path(recipe)
    demo.require()
    assert DEMOS["signs"].here() is DEMOS["signs"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_command_runs_the_demo_of_the_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run_demo(recipe: Path, directory: Path, changes: list[str], console: object, **others: Any) -> dict[str, Any]:
        asked.update(recipe=recipe, changes=changes, **others)
        return {}

    monkeypatch.setattr(devices, "pick_kind", lambda: kind)
    monkeypatch.setattr(run, "run_demo", run_demo)
    arguments = ["demo", "composition", "--set", "schedule.steps=2", "--seed", "5", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    demo = DEMOS["composition"].here()
    assert (asked["recipe"], asked["rewards"], asked["model"]) == (demo.recipe, demo.rewards, demo.model)
    assert asked["changes"] == [*demo.changes, "schedule.steps=2", "seed=5"]  # what the user says comes last
    assert bool(demo.changes) == (kind == "cuda")


def test_the_demo_on_a_gpu_trains_the_model_that_its_recipe_describes() -> None:
    demo = DEMOS["composition"].on_gpu
    assert demo is not None
    assert demo.model is not None
    spec = prepare_job(demo.recipe, demo.changes, same_machine=True)
    assert spec.model.path == str(demo.model.path)
    assert f"python -m {demo.model.command} --output" in Path(f"recipes/{demo.recipe}.toml").read_text()
    num_pictures = spec.rollout.prompts_per_step * spec.rollout.group_size
    assert num_pictures == spec.rollout.batch_size == spec.trainer.micro_batch_size == 144
    assert set(spec.reward_services) == {reward.partition("=")[0] for reward in demo.rewards}


def test_a_model_is_made_once_and_its_log_is_shown(tmp_path: Path) -> None:
    model, said = Made(tmp_path / "cache" / "model", f"{MAKER} copies"), list[str]()
    model.make(said.append)
    assert [line for line in said if "step" in line] == ["transformer step 1 of 2", "transformer step 2 of 2"]
    assert (model.path / "model_index.json").exists()
    assert list(model.path.parent.iterdir()) == [model.path]
    again = list[str]()
    replace(model, command=f"{MAKER} fails").make(again.append)
    assert not again


def test_why_a_model_was_not_made_is_said_and_half_of_it_is_never_taken(tmp_path: Path) -> None:
    model, said = Made(tmp_path / "cache" / "model", f"{MAKER} fails"), list[str]()
    with pytest.raises(ValueError, match=r"ended with code 1: ValueError: the atlas cannot be drawn\n.*DEVICE=cpu to"):
        model.make(said.append)
    assert "half of it is written" in said
    assert list(model.path.parent.iterdir()) == []
    replace(model, command=f"{MAKER} copies").make(said.append)
    assert (model.path / "model_index.json").exists()


def test_an_interrupted_one_leaves_neither_process_nor_files(tmp_path: Path) -> None:
    model = Made(tmp_path / "cache" / "model", f"{MAKER} hangs")

    def interrupt(line: str) -> None:
        if line == "half of it is written":
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model.make(interrupt)
    assert time.monotonic() - started < 60
    assert list(model.path.parent.iterdir()) == []


def test_a_full_disk_is_seen_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demos, "FREE_BYTES", 2**62)
    with pytest.raises(ValueError, match=r"MiB left.*free some, or name another cache by XDG_CACHE_HOME"):
        Made(tmp_path / "model", f"{MAKER} copies").make(print)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_says_how_what_it_lacks_is_made(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    demo = Demo(Path("tiny_ocr"), needs=(Made(there, "a.module"), Made(tmp_path / "model", "another.module --world x")))
    with pytest.raises(ValueError, match=rf"python -m another.module --world x --output {tmp_path}/model$"):
        demo.require()
    (tmp_path / "model").touch()
    demo.require()


def test_outside_of_the_repository_composition_says_where_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for demo in (DEMOS["composition"], DEMOS["composition"].on_gpu):
        assert demo is not None
        with pytest.raises(ValueError, match="run it in the folder of a clone"):
            demo.require()


def test_the_demo_of_composition_takes_the_folders_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFLEET_COMPOSITION_JUDGES", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER, raising=False)
    code = "from flowfleet.demo.demos import DEMOS; it = DEMOS['composition']; print(it.on_gpu.changes); it.require()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"('model.path={default_folder().parent}/small-")
    assert f"train_reward --world small --output {tmp_path}/reward-64.safetensors\n" in done.stderr
    assert f"train_heldout --world small --output {tmp_path}/heldout-64.safetensors\n" in done.stderr
    (tmp_path / "reward-64.safetensors").touch()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "reward-64" not in done.stderr
