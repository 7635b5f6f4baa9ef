"""The end of a log, as `up` prints it for a service that ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowfleet.local.stack import StateDir
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
