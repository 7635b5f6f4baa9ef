"""The targets of faults: a running job's processes, its files, and its keys in Redis."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from flowfleet.job.spec import JobSpec
from flowfleet.local.processes import read_records
from flowfleet.proto.trainer_pb2 import TrainStepRequest
from flowfleet.redis.keys import job_key
from tests.faults.stack import ChaosStack
from tests.faults.watch import Watch

AOF_POLL_S = 0.1
REQUEST_POLL_S = 0.1
AOF_KEPT = 100
"""Sizes of the append-only file that are remembered: 10 s."""


class Missed(Exception):
    """There is nothing to strike now; the message says why."""


@dataclass
class Targets:
    """Targets of one job on one stack."""

    chaos: ChaosStack
    watch: Watch
    job_id: str
    spec: JobSpec
    aof_sizes: list[tuple[float, Path, int]] = field(default_factory=list)
    trained: dict[int, list[str]] = field(default_factory=dict)
    """Step → step/group/index of the samples in its request to the trainer, as it was seen last in Redis."""
    _closed: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        for follow in (self._follow_aof, self._follow_requests):
            threading.Thread(target=follow, name=follow.__name__, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    # -- processes -----------------------------------------------------------------------------------------------

    def process(self, target: str, dice: float) -> psutil.Process:
        """A live process of a kind, not suspended. Raises Missed where there is none."""
        found = [process for process in self._of(target) if is_live(process)]
        if not found:
            raise Missed(f"no live {target}")
        return found[int(dice * len(found))]

    def name(self, pid: int) -> str:
        """What the stack calls a process; a pid of a trainer's is called so."""
        records = {record.pid: record.name for record in read_records(self.chaos.state.records)}
        return records.get(pid, "trainer")

    def service(self, target: str, dice: float) -> tuple[str, psutil.Process]:
        """A supervised process of a kind and its name in the plan."""
        process = self.process(target, dice)
        return self.name(process.pid), process

    def _of(self, target: str) -> list[psutil.Process]:
        if target == "trainer-agent":
            return self._agents()
        if target == "trainer-rank":
            return [child for agent in self._agents() for child in ranks_of(agent)]
        records = read_records(self.chaos.state.records)
        return [psutil.Process(r.pid) for r in records if r.name.startswith(target) and psutil.pid_exists(r.pid)]

    def _agents(self) -> list[psutil.Process]:
        records = read_records(self.chaos.state.trainers)
        return [psutil.Process(r.pid) for r in records if r.name == self.job_id and psutil.pid_exists(r.pid)]

    # -- Redis ---------------------------------------------------------------------------------------------------

    def redis(self) -> redis.Redis:
        """A client of the stack's Redis as its operator, not through a proxy. To be closed."""
        return redis.Redis.from_url(self.chaos.stack.redis_url, protocol=2, retry=None, socket_timeout=5.0)

    def aof(self) -> Path | None:
        """The append-only file that is written now: one file in Redis 6.2, the newest of a folder in 7."""
        directory = self.chaos.state.redis
        parts = sorted((directory / "appendonlydir").glob("*.incr.aof"), key=_number_of)
        if parts:
            return parts[-1]
        single = directory / "appendonly.aof"
        return single if single.exists() else None

    def aof_size_before(self, seconds: float) -> tuple[Path, int] | None:
        """The file and its size so many seconds ago; None where it was another file then, or shorter now."""
        now, current = time.monotonic(), self.aof()
        before = [(path, size) for at, path, size in self.aof_sizes if at <= now - seconds and path == current]
        return before[-1] if before else None

    def _follow_aof(self) -> None:
        while not self._closed.wait(AOF_POLL_S):
            path = self.aof()
            if path is not None:
                try:
                    self.aof_sizes.append((time.monotonic(), path, path.stat().st_size))
                except FileNotFoundError:
                    continue
                del self.aof_sizes[:-AOF_KEPT]

    def _follow_requests(self) -> None:
        """Notes which samples each step trains on: a Redis that loses its last seconds forgets them."""
        while not self._closed.wait(REQUEST_POLL_S):
            step = self.watch.now.step
            try:
                with self.redis() as client:
                    for near in range(max(0, step - 1), step + 2):
                        if stored := client.get(job_key(self.job_id, "train", near)):
                            self.trained[near] = identities(stored)
            except redis.RedisError:
                continue  # it was struck

    # -- files ---------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints of the job, oldest first."""
        folder = self.chaos.state.path / "jobs" / self.job_id / "checkpoints"
        found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(found)


def identities(request: bytes) -> list[str]:
    """step/group/index of the samples of a serialized TrainStepRequest."""
    ids = [item.sample.id for item in TrainStepRequest.FromString(request).samples]
    return [f"{one.step}/{one.group}/{one.index}" for one in ids]


def ranks_of(agent: psutil.Process) -> list[psutil.Process]:
    """The ranks that an agent has forked."""
    try:
        found: list[psutil.Process] = agent.children()
    except psutil.NoSuchProcess:
        return []
    return found


def is_live(process: psutil.Process) -> bool:
    """Whether it runs: it is neither gone nor suspended."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _number_of(path: Path) -> int:
    """Number N of appendonly.aof.N.incr.aof."""
    return int(path.name.split(".")[2])
