"""Files of settings that extend others."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfleet.job.setting_files import read_extended


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_tables_are_merged_and_all_else_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "seed = 1\n[rollout]\nheight = 64\nsteps = [1, 2]\n[rollout.noise]\neta = 0.7\n")
    own = write(
        tmp_path,
        "own.toml",
        'extends = "base.toml"\nname = "own"\n[rollout]\nsteps = [3]\n[rollout.noise]\ntype = "cps"\n',
    )
    rollout = {"height": 64, "steps": [3], "noise": {"eta": 0.7, "type": "cps"}}
    assert read_extended(own, "a job") == {"seed": 1, "name": "own", "rollout": rollout}


def test_several_bases_of_other_formats_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "parts/model.yaml", "model: {path: a, dtype: float32}\n")
    write(tmp_path, "parts/data.toml", 'extends = "more.json"\n[model]\npath = "b"\n')
    write(tmp_path, "parts/more.json", '{"seed": 5}')
    own = write(tmp_path, "own.toml", 'extends = ["parts/model.yaml", "parts/data.toml"]\n')
    assert read_extended(own, "a job") == {"model": {"path": "b", "dtype": "float32"}, "seed": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "own.toml"', "extends itself"),
        ('extends = "none.toml"', "none.toml: cannot be read"),
        ("extends = 3", "give the path of a file, or a list of paths"),
        ("extends = [3]", "give the path of a file, or a list of paths"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, text: str, message: str) -> None:
    own = write(tmp_path, "own.toml", text)
    with pytest.raises(ValueError, match=message):
        read_extended(own, "a job")
