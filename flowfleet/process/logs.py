"""Keeps logs from growing for ever: those that a process writes by its standard output, and copies of what it logs."""

import contextlib
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 2**26
ATTEMPTS: Final = 3
"""Attempts of a job's trainer whose logs stay in the job's folder."""


def rotate(log: Path, attempts: int = ATTEMPTS) -> None:
    """Makes room for the log of another attempt: it becomes NAME.1, that one NAME.2, and the oldest goes."""
    for number in range(attempts - 1, 0, -1):
        newer = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        with contextlib.suppress(FileNotFoundError):
            newer.replace(log.with_name(f"{log.name}.{number}"))


def cap(log: Path, most: int = MAX_LOG_BYTES) -> None:
    """Drops the older half of a log that is larger. Its writers append (O_APPEND), behind what stays."""
    with contextlib.suppress(OSError), log.open("rb") as file:  # no log, or a full disk: the next look tries again
        size = file.seek(0, 2)
        if size > most:
            file.seek(-(most // 2), 2)
            kept = file.read().partition(b"\n")[2]
            with log.open("ab") as writer:
                writer.truncate(0)
                writer.write(b"[older lines were dropped]\n" + kept)


def copy_to(log: Path) -> None:
    """Copies what this process logs from now on to a file of its own, where it can be written: the output of a pod is
    gone with it. A full file makes room as an attempt's does."""
    root = logging.getLogger()
    if any(isinstance(handler, logging.FileHandler) for handler in root.handlers):
        return
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        rotate(log)
        copies = RotatingFileHandler(log, maxBytes=MAX_LOG_BYTES, backupCount=ATTEMPTS - 1, encoding="utf-8")
    except OSError as error:
        logging.getLogger(__name__).warning("no copy of the log at %s: %s. Let the trainer write there", log, error)
        return
    copies.setFormatter(next((handler.formatter for handler in root.handlers), None))
    root.addHandler(copies)
