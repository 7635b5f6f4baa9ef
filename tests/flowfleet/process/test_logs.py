"""Logs stay below their limits, and those of the last attempts stay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flowfleet.process import logs
from flowfleet.process.logs import ATTEMPTS, cap, copy_to, rotate


def test_the_logs_of_the_last_attempts_stay(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    for attempt in range(5):
        rotate(log)
        log.write_text(f"attempt {attempt}")
    kept = [log, *(log.with_name(f"trainer.log.{number}") for number in range(1, ATTEMPTS))]
    assert [path.read_text() for path in kept] == ["attempt 4", "attempt 3", "attempt 2"]
    assert sorted(tmp_path.iterdir()) == kept


def test_a_long_log_keeps_its_newest_lines_and_its_writer(tmp_path: Path) -> None:
    log, most = tmp_path / "a.log", 10_000
    cap(log, most)
    assert not log.exists()
    with log.open("ab", buffering=0) as writer:
        for number in range(5000):
            writer.write(f"line {number}\n".encode())
            cap(log, most)
            assert log.stat().st_size <= most
    first, *rest = log.read_text().splitlines()
    assert first == "[older lines were dropped]"
    assert rest == [f"line {number}" for number in range(5000 - len(rest), 5000)]
    assert len(rest) > 300


def test_what_a_process_logs_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = tmp_path / "logs" / "rank-0.log"
    copy_to(log)
    copy_to(log)
    logging.getLogger("a").error("broken")
    assert log.read_text() == "broken\n"
    assert not log.with_name("rank-0.log.1").exists()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    copy_to(log)
    assert log.with_name("rank-0.log.1").read_text() == "broken\n"


def test_a_copy_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 1000)
    copy_to(tmp_path / "rank-0.log")
    for number in range(500):
        logging.getLogger("a").error("line %d", number)
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == ATTEMPTS
    assert all(path.stat().st_size <= 1000 for path in kept)
    assert kept[0].read_text().endswith("line 499\n")


def test_a_folder_that_cannot_be_written_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is in the folder's place, and a folder in an older log's."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "rank-0.log.2" / "x").mkdir(parents=True)
    (tmp_path / "folder" / "rank-0.log.1").write_text("")
    for folder in ("file", "folder"):
        copy_to(tmp_path / folder / "rank-0.log")
        assert f"{folder}/rank-0.log: " in caplog.text
