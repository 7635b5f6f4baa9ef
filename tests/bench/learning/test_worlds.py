"""What the larger worlds' studies begin with: made once, on the GPUs that are given, and found by what starts later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.learning.ablations import STUDIES
from bench.learning.worlds import WORLD_OF, make_world, parts, world_of
from flowfleet.demo.demos import Made
from recipes.composition.judges.service import FOLDER, file_of
from recipes.composition.world import WORLDS

MAKER = "tests.flowfleet.demo.maker"


def test_studies_are_of_one_world() -> None:
    assert set(WORLD_OF) <= set(STUDIES)
    assert set(WORLD_OF.values()) == set(WORLDS) - {"small"}
    assert world_of(["group", "window"]) is None
    assert world_of(["full", "full_settings"]) == "full"
    with pytest.raises(ValueError, match="of several worlds"):
        world_of(["group", "medium"])


def test_what_is_made_is_what_jobs_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, *judges = parts("medium", tmp_path)
    assert base.command.endswith("--world medium")
    for one in (base, *judges):
        one.path.mkdir(parents=True)
    monkeypatch.setitem(os.environ, FOLDER, "elsewhere")
    make_world([base, *judges], [""], print)
    assert [one.path for one in judges] == [file_of("reward", 128), file_of("heldout", 128)]


def test_gpus_take_turns_and_logs_say_whose_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, FOLDER, "elsewhere")
    command, said = f"{MAKER} tells CUDA_VISIBLE_DEVICES", list[str]()
    wanted = [Made(tmp_path / str(number), command, f"part {number}") for number in range(3)]
    make_world(wanted, ["4", "5"], said.append)
    assert [one.path.read_text() for one in wanted] == ["4", "5", "4"]
    assert {line for line in said if "step 1" in line} == {
        f"part {number}: transformer step 1 of 2" for number in range(3)
    }


def test_it_wants_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --gpus 0"):
        make_world(parts("medium", tmp_path), [""], print)
