"""Scoring on several CPU cores at once: processes with a scorer each, which are handed parts of a batch.

A process gets encoded samples as bytes over a pipe, decodes and scores them on one thread, and sends outcomes back. One
that dies is replaced, and the samples it had are asked again one by one, once; the one on which it dies again becomes a
`Problem`. One that takes longer than the scorer's `ProcessLimits` is killed, and has died. For a scorer that needs
groups, all this goes group by group. The pipe is its life line: a process ends when its parent closes it, or is gone,
however that happened.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from flowfleet.errors import Unavailable
from flowfleet.proto.reward_pb2 import RewardSample
from flowfleet.service import keep_freed_memory, usable_cpus
from flowfleet.telemetry import configure_logging
from services.reward.evaluator import DIED, Evaluator
from services.reward.groups import units
from services.reward.metrics import RewardMetrics
from services.reward.scorers.base import AnyScorer, Outcome, Problem, ProcessLimits, Scorer

MIN_PART = 2
"""Samples handed over at a time, where the scorer takes so many: few (`ProcessLimits.max_part`), so that all processes
end together and little is asked again after a death; not one, which the OCR reader would read twice over."""

MAX_PROCESSES = 16
"""By default: they read more pictures a second than a dozen GPUs make."""

START_S = 300.0
"""For a process to come up."""

END_S = 10.0

log = logging.getLogger(__name__)

Make = Callable[[], AnyScorer]
Part = Sequence[Sequence[RewardSample]]
"""Units: samples, or whole groups of them."""


def default_processes(heavy: bool) -> int:
    """Half of the usable CPUs for a scorer that is heavy, at most `MAX_PROCESSES`: the other services need some too.
    One, which means none beside the service's own, on fewer than four CPUs."""
    return max(1, min(usable_cpus() // 2, MAX_PROCESSES)) if heavy else 1


class ProcessPool:
    """`num_processes` scorers made by `make`, which must be importable from a new process. Takes the place of an
    `Evaluator`. Unavailable when a process does not come up."""

    num_batches = 2
    """At once, so that the parts of the next keep busy who is done with the first."""

    def __init__(
        self,
        make: Make,
        num_processes: int,
        metrics: RewardMetrics,
        log_level: str = "info",
        limits: ProcessLimits = ProcessLimits(),
        whole_groups: bool = False,
    ) -> None:
        self._metrics = metrics
        self._limits = limits
        self._whole_groups = whole_groups
        self._workers = [_Worker(make, log_level) for _ in range(num_processes)]
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pool")
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        try:
            for worker in self._threads.map(_Worker.started, self._workers):
                self._idle.put(worker)
        except _Died as death:
            self.close()
            raise Unavailable(f"a scoring process did not start ({death}); the log has the reason") from None
        metrics.set_processes(num_processes)

    def __call__(self, samples: Sequence[RewardSample], params: Any) -> list[Outcome]:
        """One outcome a sample, in order. From several threads at once."""
        parts = [
            self._threads.submit(self._score, part, params)
            for part in parts_of(units(samples, self._whole_groups), len(self._workers), self._limits.max_part)
        ]
        return [outcome for part in parts for outcome in part.result()]

    def close(self) -> None:
        """Ends the processes when they have done what they were asked, or are killed for taking too long."""
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def _score(self, part: Part, params: Any) -> list[Outcome]:
        worker, start = self._idle.get(), time.perf_counter()
        try:
            return self._ask(worker, [sample for unit in part for sample in unit], params)
        except _Died as death:
            self._note(death)
            return [outcome for unit in part for outcome in self._once_more(worker, unit, params)]
        finally:
            self._metrics.observe_busy(time.perf_counter() - start)
            self._idle.put(worker)

    def _once_more(self, worker: _Worker, unit: Sequence[RewardSample], params: Any) -> list[Outcome]:
        try:
            return self._ask(worker, unit, params)
        except _Died as death:
            self._note(death)
            hint = (
                f": raise {self._limits.setting} if that is too little" if death.late and self._limits.setting else ""
            )
            text = f"the process that scored this sample died twice, the second time with {death}{hint}"
            return [Problem(DIED, text)] * len(unit)

    def _ask(self, worker: _Worker, samples: Sequence[RewardSample], params: Any) -> list[Outcome]:
        """Raises _Died."""
        encoded = [sample.SerializeToString() for sample in samples]
        return worker.score(encoded, params, self._limits.seconds(len(encoded)))

    def _note(self, death: _Died) -> None:
        log.warning("a scoring process died with %s: another one takes its place", death)
        self._metrics.observe_death()


def parts_of(batch: Sequence[Sequence[RewardSample]], num_processes: int, max_part: int) -> Iterator[Part]:
    """Cuts a batch, in order and between units, so that all processes get some of it."""
    number = sum(len(unit) for unit in batch)
    size = min(max(math.ceil(number / num_processes), MIN_PART), max_part)
    part: list[Sequence[RewardSample]] = []
    room = size
    for unit in batch:
        if part and len(unit) > room:
            yield part
            part, room = [], size
        part.append(unit)
        room -= len(unit)
    if part:
        yield part


class _Died(Exception):
    """A process ended before it answered; says with which exit code or signal."""

    def __init__(self, how: str, late: bool = False) -> None:
        super().__init__(how)
        self.late = late


class _Worker:
    """One process, started when it is needed. For one thread at a time."""

    def __init__(self, make: Make, log_level: str) -> None:
        self._make = make
        self._log_level = log_level
        self._process: SpawnProcess | None = None
        self._pipe: Connection[Any, Any]

    def started(self) -> _Worker:
        """Itself, with a process that is ready. Raises _Died."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs, self._make, self._log_level), daemon=True)
            self._process.start()
            theirs.close()
            self._answer(START_S)
        return self

    def score(self, samples: list[bytes], params: Any, seconds: float) -> list[Outcome]:
        """Raises _Died; RuntimeError for what fails outside of the scorer."""
        self.started()
        outcomes: list[Outcome] | None = self._answer(seconds, (samples, params))
        if outcomes is None:
            raise RuntimeError("a scoring process failed; the log has the reason")
        return outcomes

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process)

    def _answer(self, seconds: float, request: Any = None) -> Any:
        """What it says to a request, or when it is ready. After so many seconds it is killed, which ends both waits:
        for it to take the request, and to answer."""
        assert self._process is not None
        start = time.perf_counter()
        try:
            with _killed_after(seconds, self._process):
                if request is not None:
                    self._pipe.send(request)
                return self._pipe.recv()
        except (EOFError, OSError):
            is_late = time.perf_counter() - start >= seconds
            death = self._end(self._process)
            raise _Died(f"{death} after {seconds:g} s without an answer" if is_late else death, is_late) from None

    def _end(self, process: SpawnProcess) -> str:
        """Closes the pipe, waits for the end, and forgets the process. Says with which exit code or signal it ended."""
        self._pipe.close()
        process.join(END_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode or 0
        process.close()
        self._process = None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextmanager
def _killed_after(seconds: float, process: SpawnProcess) -> Iterator[None]:
    """Unless what is inside is done before."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _work(pipe: Connection[Any, Any], make: Make, log_level: str) -> None:
    """The life of a process: says that it is ready, then answers part after part until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's Ctrl-C: the parent drains and closes the pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    configure_logging("reward", log_level)
    try:
        scorer = make()
        assert isinstance(scorer, Scorer)
        evaluate = Evaluator(scorer, 1)
    except Exception:
        log.exception("a scoring process has no scorer")
        sys.exit(1)
    with suppress(EOFError, OSError):  # the parent has closed the pipe, or is gone
        pipe.send(None)
        while True:
            samples, params = pipe.recv()
            pipe.send(_evaluated(evaluate, samples, params))


def _evaluated(evaluate: Evaluator[Any], samples: list[bytes], params: Any) -> list[Outcome] | None:
    try:
        return evaluate([RewardSample.FromString(sample) for sample in samples], params)
    except Exception:
        log.exception("%d samples failed outside of the scorer", len(samples))
        return None


def _end_with_parent() -> None:
    """Also in the middle of a part, whose answer nobody waits for any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
