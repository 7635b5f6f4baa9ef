"""The state directory of a stack on one machine.

stack.json      addresses, pids, Redis URL, API key; there while every process serves (0600: it holds secrets)
supervisor.pid  held locked by the live supervisor, so that a stale directory is recognized for certain
processes/      a record of each process of the supervisor
trainers/       a record of each trainer, written by the controller that launched it
logs/           one file a process
redis/          data of the Redis server (0700)
secrets/        passwords, tokens and the API key by kind of process (0700)
pools.json      rollout pools that the supervisor runs; those added while it ran outlive it
devices.json    which job's trainer, which pool or reward has which accelerators
jobs/, uploads/ what the controller keeps for jobs

The directory is its owner's alone (0700), unless it holds other things too: then each of these folders is. A file in
it is believed only where no other user could write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from flowfleet.local.files import is_private, make_private, open_own, read_own, take, write_atomically

DEFAULT_STATE_DIR = Path("runs/local")
DEFAULT_PORT = 8470
"""Default port of the REST API."""
MARK = "FLOWFLEET_STACK"
"""Environment variable of every process of a stack, holding its absolute state directory."""
WATCHDOG = "flowfleet.local.supervision.watchdog"
"""Module of a process with a state directory as its argument."""
NOBODY = 0
"""Content of the lock file while a watchdog cleans up, and until an owner has written its pid."""
LOCK_POLL_S = 0.05
LOCK_PATIENCE_S = 0.5
"""Others look at the lock for a moment."""
CLEANUP_PATIENCE_S = 30.0
PROC = Path("/proc")
RELOADED = "reloaded.json"
"""In a stack's directory: reward → version of its file that `rewards reload` accepted; "" while it starts again."""
_FOLDERS = ("processes", "trainers", "logs", "redis", "secrets")
_DATA = ("jobs", "uploads")
_FILES = ("stack.json", "supervisor.pid", "keys.toml", "rewards.toml", "pools.json", "devices.json", "devices.lock")
_NAMES = frozenset({*_FOLDERS, *_DATA, *_FILES, RELOADED})
"""Everything that a stack has in its directory."""


class StackError(Exception):
    """The stack cannot be started or found; the message says why and what to do."""


class RunningProcess(BaseModel):
    """A process as stack.json shows it."""

    model_config = ConfigDict(frozen=True)

    pid: int
    address: str
    """host:port it serves on."""
    metrics: str | None = None
    """host:port of its Prometheus endpoint."""
    log: str
    engine: str | None = None
    """Engine of a rollout."""
    devices: tuple[str, ...] = ()
    """Accelerators that it is confined to."""
    pool: str = ""
    """Pool of a rollout."""


class Stack(BaseModel):
    """A running stack: the content of stack.json."""

    model_config = ConfigDict(frozen=True)

    url: str
    """URL of the REST API."""
    redis_url: str
    state_dir: str
    supervisor: int
    """Its pid."""
    processes: dict[str, RunningProcess]
    trainer_devices: tuple[str, ...] = ()
    """Accelerators of a job's trainer."""
    warning: str | None = None
    """Warning about how accelerators are shared, or about callers without a key."""
    api_key: str = ""
    """Key of the REST API; empty on a stack that asks for none."""

    @property
    def page(self) -> str:
        """Link to the live page, which logs in by the key in it. Browsers send no fragment, so no log has the key."""
        return f"{self.url}/" + (f"#key={quote(self.api_key, safe='')}" if self.api_key else "")


class StateDir:
    """Paths and files of one stack. The path is made absolute at once: processes are marked with it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.stack_file = self.path / "stack.json"
        self.lock_file = self.path / "supervisor.pid"
        self.logs = self.path / "logs"
        self.redis = self.path / "redis"
        self.secrets = self.path / "secrets"
        self.records = self.path / "processes"
        self.trainers = self.path / "trainers"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def write(self, stack: Stack) -> None:
        write_atomically(self.stack_file, stack.model_dump_json(indent=2) + "\n")

    def read(self) -> Stack | None:
        """Returns the stack that runs here; None if there is none (a stale stack.json counts as none)."""
        if self.supervisor_pid() is None:
            return None
        try:
            return Stack.model_validate_json(read_own(self.stack_file))
        except (OSError, ValidationError):
            return None

    def supervisor_pid(self) -> int | None:
        """Pid of the live supervisor, None without one, or where the stack is another user's."""
        try:
            with open_own(self.lock_file, os.O_RDWR) as file:
                if _try_lock(file.fileno()):
                    return None
                return int(file.read() or 0) or None
        except OSError:
            return None

    def make(self) -> None:
        """Makes the directory or takes it over, with files of earlier releases, which others could write. Raises
        StackError for one in which another user could replace files."""
        try:
            take(self.path, _NAMES)
            for name in (*_FOLDERS, *(() if is_private(self.path) else _DATA)):
                make_private(self.path / name)
        except OSError as error:
            raise StackError(f"no stack can run in {self.path} ({error}): give another --state-dir") from None
        open_own(self.lock_file, os.O_RDWR | os.O_CREAT).close()

    @contextlib.contextmanager
    def lock(self, owner: int | None = None) -> Iterator[None]:
        """Makes this process the stack's one supervisor, or takes the lock for a watchdog, which gives the `owner`.
        Raises StackError where another supervisor lives.

        A watchdog that is just ending a dead supervisor's stack is waited for.
        """
        self.make()
        with open_own(self.lock_file, os.O_RDWR | os.O_CREAT) as file:
            _wait_for_lock(file, self.path)
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid() if owner is None else owner))
            file.flush()
            yield

    def forget(self) -> None:
        """Removes the files that show a running stack. Logs and data stay."""
        self.stack_file.unlink(missing_ok=True)
        for record in [*self.records.glob("*.json"), *self.trainers.glob("*.json")]:
            record.unlink(missing_ok=True)

    def log_tail(self, name: str, num_lines: int = 8) -> str:
        """The end of a process's log: messages, and the exceptions that were logged with them, out of their JSON."""
        try:
            lines = self.log(name).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return textwrap.indent("\n".join(map(_message, lines[-num_lines:])), "  ")


def stack_at(url: str) -> Stack | None:
    """The stack of this user that serves at `url` on this machine, wherever its directory is."""
    stacks = (StateDir(folder).read() for folder in _watched_folders())
    return next((stack for stack in stacks if stack is not None and stack.url == url), None)


def _watched_folders() -> Iterator[Path]:
    """State directories of the watchdogs of this user: every running stack has one, which is never forked."""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.stat().st_uid != os.geteuid():
                continue
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", WATCHDOG.encode()] and any(words[3:4]):
                yield Path(os.fsdecode(words[3]))


def _wait_for_lock(file: TextIO, path: Path) -> None:
    tries = 0
    while not _try_lock(file.fileno()):
        file.seek(0)
        owner = int(file.read() or NOBODY)
        tries += 1
        if tries * LOCK_POLL_S > (CLEANUP_PATIENCE_S if owner == NOBODY else LOCK_PATIENCE_S):
            raise StackError(
                f"a stack is already running in {path} (pid {owner}); stop it with `flowfleet down`, or give another "
                "--state-dir and --port"
            )
        time.sleep(LOCK_POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _raised(traceback: str) -> str:
    """The exception at the end of a traceback, without its frames."""
    last = traceback.rstrip().split('\n  File "')[-1].splitlines()
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("  "), last[1:])) or last[0]


def _message(line: str) -> str:
    try:
        entry = json.loads(line)
        return str(entry["msg"]) + (f": {_raised(entry['error'])}" if entry.get("error") else "")
    except (ValueError, KeyError, TypeError):
        return line
