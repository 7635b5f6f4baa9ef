"""The end of a log, as `up` prints it for a service that ended, and which stack a client finds."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowfleet.local import stack
from flowfleet.local.stack import WATCHDOG, Stack, StateDir, stack_at
from flowfleet.process.telemetry import JsonFormatter


class Settings(BaseModel):
    number: int


def plain() -> None:
    raise KeyError("tag")


def with_many_lines() -> None:
    Settings.model_validate({"number": "many"})


def chained() -> None:
    try:
        plain()
    except KeyError as error:
        raise RuntimeError("no such column") from error


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (plain, ["KeyError: 'tag'"]),
        (with_many_lines, ["1 validation error for Settings", "number", "Input should be a valid integer"]),
        (chained, ["RuntimeError: no such column"]),
    ],
)
def test_an_exception_is_told(tmp_path: Path, fail: Callable[[], None], told: list[str]) -> None:
    state, formatter = StateDir(tmp_path), JsonFormatter("reward")
    state.logs.mkdir()
    try:
        fail()
    except Exception:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "service failed", (), sys.exc_info())
    state.log("reward").write_text(formatter.format(record) + "\nKilled\n")
    tail = state.log_tail("reward")
    assert tail.startswith("  service failed: ")
    assert all(words in tail for words in told)
    assert "  File" not in tail
    assert tail.endswith("\n  Killed")


@pytest.mark.parametrize(
    "words", [b"", b"a\0-m", b"a\0-m\0WATCHDOG", b"a\0-m\0WATCHDOG\0", b"a\0-m\0WATCHDOG\0\0", b"\xff"]
)
def test_foreign_command_lines_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    own = StateDir(tmp_path / "own")
    for pid, line in (("1", words.replace(b"WATCHDOG", WATCHDOG.encode())), ("2", _watchdog(own)), ("3", None)):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        if line is not None:
            (tmp_path / "proc" / pid / "cmdline").write_bytes(line)
    monkeypatch.setattr(stack, "PROC", tmp_path / "proc")
    monkeypatch.chdir(tmp_path / "proc")
    assert list(stack._watched_folders()) == [own.path]
    url = "http://127.0.0.1:1"
    with own.lock():
        own.write(Stack(url=url, redis_url="", state_dir="", supervisor=os.getpid(), processes={}))
        assert stack_at(url) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_processes_of_other_users_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "cmdline").write_bytes(_watchdog(StateDir(tmp_path)))
    os.chown(tmp_path / "1", 65_534, -1)
    monkeypatch.setattr(stack, "PROC", tmp_path)
    assert list(stack._watched_folders()) == []


def _watchdog(state: StateDir) -> bytes:
    return b"\0".join([b"python", b"-m", WATCHDOG.encode(), os.fsencode(state.path), b""])
