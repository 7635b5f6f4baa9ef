"""`flowfleet slurm down` ends a fleet in whatever state it is, also one that is being queued again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.slurm import commands
from flowfleet.slurm.commands import end_fleet


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        (["RUNNING", "RUNNING", "COMPLETING", ""], ["TERM"]),
        (["RUNNING", "COMPLETING", "PENDING"], ["TERM", "cancel"]),
        (["PENDING", "PENDING"], ["cancel"]),
        (["RUNNING", *["RUNNING"] * 9], ["TERM", "cancel"]),
        ([""], []),
    ],
    ids=["ends", "was queued again", "queued", "hangs", "has ended"],
)
def test_a_fleet_ends(states: list[str], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    left: Iterator[str] = iter(states)
    monkeypatch.setattr(commands, "POLL_S", 0.0)
    monkeypatch.setattr(commands, "state_of", lambda _: (next(left, ""), "", ""))
    monkeypatch.setattr(commands, "slurm", lambda *argv: told.append("TERM" if "--batch" in argv else "cancel"))
    (tmp_path / "slurm.json").write_text('{"job_id": "7"}')
    ticks = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    assert end_fleet(tmp_path, 5.0) == bool(asked)
    assert told == asked
