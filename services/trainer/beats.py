"""Signs that a rank lives and that its working thread makes progress, and the longest time between two of each.

The working thread declares its phase and counts finished units: a forward, a bucket, a parameter. `carry` only forwards
phase and count, so a live process with a hanging working thread shows the same count for ever. Rank 0 reports to the
controller in `GetStatus`; the other ranks report to rank 0 through the store at which the ranks met. The controller
decides (services/controller/job/trainer/hangs.py): clocks of ranks are never compared.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any

from torch._C._distributed_c10d import TCPStore

from flowfleet.job.spec import TimeoutPart
from flowfleet.proto.trainer_pb2 import RankProgress

CARRY_S = 0.5
STORE_TIMEOUT = timedelta(seconds=30)
LOAD_S = 600.0
CONNECT_S = 600.0
COMPILE_S = 3600.0
COMPILE_SILENCE_S = 600.0
"""Longest time without a sign in a compilation, which held the interpreter's lock for 0.4 s of CPU time at most."""
OUTSIDE_S = 120.0
HEARD_S = 1.0
"""Maximum seconds that a compilation waits for the controller to hear of it: it may hold the interpreter's lock."""

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Kind of work that a rank's working thread does. Each kind has its own limit on the time without progress."""

    IDLE = "idle"  # waits for a command, for ever if need be
    WORK = "work"  # computes or takes part in collectives
    LOAD = "load"  # makes the model and reads its weights, a parameter a sign
    CONNECT = "connect"  # the first collective of an accelerator, which connects all ranks
    COMPILE = "compile"  # torch.compile, which may be silent for very long
    OUTSIDE = "outside"  # waits for Redis, a blob store or replicas, whose clients have deadlines of their own
    CHECKPOINT = "checkpoint"  # reads or writes a whole checkpoint, or writes the trained model


def silence_s(phase: Phase, timeouts: TimeoutPart) -> float:
    """The longest time without a sign in a phase, in seconds: a process that stands still gives none."""
    return max(timeouts.hang_s, COMPILE_SILENCE_S if phase is Phase.COMPILE else 0.0)


def limit_s(phase: Phase, timeouts: TimeoutPart) -> float:
    """The longest time without progress in a phase, in seconds."""
    limits = {
        Phase.LOAD: LOAD_S,
        Phase.CONNECT: CONNECT_S,
        Phase.COMPILE: COMPILE_S,
        Phase.OUTSIDE: OUTSIDE_S,
        Phase.CHECKPOINT: timeouts.checkpoint_s,
    }
    return max(timeouts.hang_s, limits.get(phase, 0.0))


class Beats:
    """Signs of life of one rank. `beat` and `phase` belong to the working thread; any thread may call the rest."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.timeouts = TimeoutPart()
        """The job's, from `configure` on."""
        self._world_size = world_size
        self._phase, self._count, self._signs = Phase.IDLE, 0, 0
        self._is_compiling = False
        self._others: list[RankProgress] = []
        self._store: Any = None
        self._asked_at = float("-inf")
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._carrier: threading.Thread | None = None

    def beat(self) -> None:
        """Counts a unit of work."""
        self._count += 1

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Declares what the working thread does inside."""
        outer = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    def watch_compilations(self) -> None:
        """Declares every compilation of torch.compile, also those that a backward or another input begins. A rank that
        samples compiles in another thread, whatever its working thread does meanwhile."""
        from torch._dynamo.callback import callback_handler  # takes seconds to import

        def begin(_: Any) -> None:
            self._is_compiling = True
            self._count += 1
            self._make_heard()

        def end(_: Any) -> None:
            self._is_compiling = False
            self._count += 1

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)

    def progress(self) -> list[RankProgress]:
        """Returns the newest known progress of each rank. The controller asks rank 0 for it."""
        self._asked_at = time.monotonic()
        this_rank = self._sign()
        self._heard.set()
        return [this_rank, *self._others]

    def carry(self) -> None:
        """Starts the thread that brings the signs of all ranks to rank 0. A world of one needs none."""
        if self._world_size > 1:
            self._store = TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=STORE_TIMEOUT
            )
            self._carrier = threading.Thread(target=self._carry, name="beats", daemon=True)
            self._carrier.start()

    def close(self) -> None:
        """Ends the thread of `carry`: if it is inside the store when the interpreter exits, the process aborts."""
        self._closed.set()
        if self._carrier is not None:
            self._carrier.join(STORE_TIMEOUT.total_seconds())

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._count += 1

    def _make_heard(self) -> None:
        if self.rank > 0:
            self._store.set(_key(self.rank), self._sign().SerializeToString())
        elif time.monotonic() - self._asked_at < 10 * HEARD_S:  # somebody watches
            self._heard.clear()
            self._heard.wait(HEARD_S)

    def _sign(self) -> RankProgress:
        self._signs += 1
        phase = Phase.COMPILE if self._is_compiling and self._phase is not Phase.IDLE else self._phase
        return RankProgress(
            rank=self.rank,
            phase=phase,
            limit_s=limit_s(phase, self.timeouts),
            silence_s=silence_s(phase, self.timeouts),
            count=self._count,
            signs=self._signs,
        )

    def _carry(self) -> None:
        keys = [_key(rank) for rank in range(1, self._world_size)]
        while not self._closed.is_set():
            try:
                if self.rank > 0:
                    self._store.set(_key(self.rank), self._sign().SerializeToString())
                elif self._store.check(keys):
                    self._others = [RankProgress.FromString(data) for data in self._store.multi_get(keys)]
            except RuntimeError as error:  # the process that holds the store is gone or hangs: the controller will see
                log.warning("could not send progress to rank 0: %s", error)
            self._closed.wait(CARRY_S)


def _key(rank: int) -> str:
    return f"flowfleet/progress/{rank}"
