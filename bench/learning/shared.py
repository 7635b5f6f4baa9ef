"""Reward services that runs on one GPU share. A run's own would be three of its five processes there, and MPS allows
48 a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.learning.runs import Place, environment_of, tail
from flowfleet.local.rewards import parse_reward
from flowfleet.process.service import end_with_parent

RUNS_PER_SERVICE = 8
"""A service is busy for a tenth of a run's step."""
START_LIMIT_S = 180.0
POLL_S = 0.2


@contextlib.contextmanager
def shared_rewards(where: Sequence[Place], rewards: Sequence[str]) -> Iterator[list[Place]]:
    """The places with the addresses of `rewards` (as `flowfleet up --reward` takes them), which end with the block.
    Places without a GPU come back as they are: their runs start their own. ValueError where a reward does not start."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowfleet-rewards-")))
        services: dict[Place, list[_Service]] = {}
        for gpu in dict.fromkeys(place.gpu for place in where if place.gpu):
            ones = [place for place in where if place.gpu == gpu]
            for first in range(0, len(ones), RUNS_PER_SERVICE):
                users = ones[first : first + RUNS_PER_SERVICE]
                started = list[_Service]()
                for reward in rewards:
                    started.append(_Service(reward, users, folder / f"{gpu}-{first}"))
                    stack.callback(started[-1].end)
                services |= dict.fromkeys(users, started)
        yield [replace(place, rewards=tuple(one.as_reward() for one in services.get(place, ()))) for place in where]


class _Service:
    """A reward on the GPU and the cores of the runs that it scores for."""

    def __init__(self, reward: str, users: Sequence[Place], files: Path) -> None:
        about = parse_reward(reward)
        self._name = about.name
        self._port, self._log = (files.with_name(f"{files.name}-{about.name}.{end}") for end in ("port", "log"))
        command = [sys.executable, "-m", "services.reward", "--scorer", str(about.scorer)]
        command += ["--port-file", str(self._port)]
        if about.settings_file is not None:
            command += ["--settings", str(about.settings_file)]
        command += [part for setting in about.settings for part in ("--set", setting)]
        cores = {core for place in users for core in place.cores}

        def begin() -> None:
            end_with_parent()
            os.sched_setaffinity(0, cores)

        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment_of(users[0]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=begin,
            )

    def as_reward(self) -> str:
        """NAME=HOST:PORT, once it answers."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._port.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = "\n".join(tail(self._log))
                raise ValueError(f"the reward {self._name} failed to start; the end of its log:\n{log}")
            time.sleep(POLL_S)
        return f"{self._name}={self._port.read_text().strip()}"

    def end(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
