"""Reward services that are added to a file while the controller runs."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import SecretStr

from services.controller.platforms.local.directory import StaticDirectory
from services.controller.settings import ControllerSettings


def write(file: Path, text: str, at: int) -> None:
    """Writes with an explicit change time: two writes may share a tick of the clock."""
    file.write_text(text)
    os.utime(file, ns=(at, at))


def test_the_file_is_read_as_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "rewards.toml"
    directory = StaticDirectory({"ocr": "a:1"}, file)
    assert directory.rewards == {"ocr": ("a:1",)}
    write(file, 'ocr-v2 = "127.0.0.1:7012"\n', 1)
    assert directory.rewards == {"ocr": ("a:1",), "ocr-v2": ("127.0.0.1:7012",)}
    write(file, 'ocr = "b:2"  # moved\n', 2)
    assert directory.rewards == {"ocr": ("b:2",)}
    for at, broken in enumerate(('ocr = "no address"', "ocr = 7", "[half", 'a = {b = "c:1"}'), start=3):
        write(file, broken, at)
        assert directory.rewards == {"ocr": ("b:2",)}
    write(file, "", 9)
    assert directory.rewards == {"ocr": ("a:1",)}
    file.unlink()
    assert directory.rewards == {"ocr": ("a:1",)}


def test_the_flag(tmp_path: Path) -> None:
    env = {"FLOWFLEET_REDIS_URL": "redis://127.0.0.1:6379/0"}
    found = ControllerSettings.from_command_line(["--rewards-file", str(tmp_path / "r.toml")], env)
    assert found == ControllerSettings(
        redis_url=SecretStr(env["FLOWFLEET_REDIS_URL"]), rewards_file=tmp_path / "r.toml"
    )
