"""Scoring on several CPU cores at once: processes with a scorer each, which are handed parts of a batch.

A process finds encoded samples in memory that it shares with its parent, decodes and scores them, and sends outcomes
back over a pipe; its next parts are decoded while it scores one. One that dies is replaced, and the samples of the part
that it scored are asked again one by one, once; the one on which it dies again becomes a `Problem`. One that takes
longer for a part than the scorer's `ProcessLimits` is killed, and has died. For a scorer that needs groups, all this
goes group by group. The pipe is its life line: a process ends when its parent closes it, or is gone, however that
happened.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from flowfleet.errors import Unavailable
from flowfleet.process.service import keep_freed_memory, usable_cpus
from flowfleet.process.telemetry import configure_logging
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.evaluator import DIED, MAX_DECODED_PIXELS, Evaluator, Part
from services.reward.execution.groups import units
from services.reward.execution.shared_memory import SharedMemory
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AnyScorer, Outcome, Problem, ProcessLimits, Scorer

MIN_PART = 2
"""Samples handed over at a time, where the scorer takes so many: few (`ProcessLimits.max_part`), so that all processes
end together and little is asked again after a death; not one, which the OCR reader would read twice over."""

MAX_AHEAD = 3
"""Parts that a process decodes at most while it scores one, with a thread each."""

MAX_PROCESSES = 16
"""Default maximum of processes: they read more pictures per second than a dozen GPUs make."""

START_S = 300.0
"""Time for a process to start."""

END_S = 10.0

log = logging.getLogger(__name__)

Make = Callable[[], AnyScorer]
Unit = Sequence[EncodedSample]
"""A sample, or a whole group of them."""
_Handed = tuple[int, Future[tuple[list[Part], Any]]]
"""Number of what a process was handed, and its arguments of `Evaluator.finish`."""


def default_processes(heavy: bool) -> int:
    """Half of the usable CPUs for a scorer that is heavy, at most `MAX_PROCESSES`: the other services need some too.
    One on fewer than four CPUs, which means only the service's own."""
    return max(1, min(usable_cpus() // 2, MAX_PROCESSES)) if heavy else 1


class ProcessPool:
    """`num_processes` scorers made by `make`, which must be importable from a new process; up to `num_threads` threads
    of each decode. Takes the place of an `Evaluator`. Unavailable when a process does not come up."""

    num_batches = 4
    """At once, so that a group that comes in several calls keeps all processes busy."""

    def __init__(
        self,
        make: Make,
        num_processes: int,
        metrics: RewardMetrics,
        log_level: str = "info",
        limits: ProcessLimits = ProcessLimits(),
        whole_groups: bool = False,
        num_threads: int = 1,
    ) -> None:
        self._metrics = metrics
        self._limits = limits
        self._whole_groups = whole_groups
        self._num_ahead = min(num_threads, MAX_AHEAD)
        self._workers = [_Worker(make, log_level, self._num_ahead) for _ in range(num_processes)]
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pool")
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        try:
            for worker in self._threads.map(_Worker.started, self._workers):
                self._idle.put(worker)
        except _Died as death:
            self.close()
            raise Unavailable(f"a scoring process did not start ({death}); the log has the reason") from None
        metrics.set_processes(num_processes)

    def __call__(self, samples: Sequence[EncodedSample], params: Any) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order. Several threads may call it at once."""
        units_ = units(samples, self._whole_groups)
        parts = [_Part(part) for part in parts_of(units_, len(self._workers), self._limits.max_part)]
        waiting = deque(parts)
        for driver in [
            self._threads.submit(self._drive, waiting, params) for _ in range(min(len(self._workers), len(parts)))
        ]:
            driver.result()
        return [outcome for part in parts for outcome in part.outcomes]

    def close(self) -> None:
        """Ends the processes when they have done what they were asked, or are killed for taking too long."""
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def _drive(self, waiting: deque[_Part], params: Any) -> None:
        """Has one process answer parts while some wait. It takes some ahead while that leaves enough for the others."""
        worker, start = self._idle.get(), time.perf_counter()
        try:
            had: deque[_Part] = deque()
            while True:
                while len(had) <= self._num_ahead and len(waiting) > len(had) * (len(self._workers) - 1):
                    try:
                        had.append(waiting.popleft())
                    except IndexError:
                        break
                    worker.hand(had[-1].samples, params)
                if not had:
                    return
                if not self._answered(worker, had.popleft(), params):
                    while had:  # each alone: it may have died of decoding one of them
                        worker.hand(had[0].samples, params)
                        self._answered(worker, had.popleft(), params)
        except Exception:
            worker.end()  # it may hold answers that will not be read
            raise
        finally:
            self._metrics.observe_busy(time.perf_counter() - start)
            self._idle.put(worker)

    def _answered(self, worker: _Worker, part: _Part, params: Any) -> bool:
        """The first part that a process has. False if it died, and others that it had are gone with it."""
        try:
            part.outcomes = worker.answer(self._limits.seconds(len(part.samples)))
        except _Died as death:
            self._note(death)
            part.outcomes = [outcome for unit in part.units for outcome in self._once_more(worker, unit, params)]
            return False
        return True

    def _once_more(self, worker: _Worker, unit: Unit, params: Any) -> list[Outcome]:
        try:
            worker.hand(unit, params)
            return worker.answer(self._limits.seconds(len(unit)))
        except _Died as death:
            self._note(death)
            hint = (
                f": raise {self._limits.setting} if that is too little" if death.late and self._limits.setting else ""
            )
            text = f"the process that scored this sample died twice, the second time with {death}{hint}"
            return [Problem(DIED, text)] * len(unit)

    def _note(self, death: _Died) -> None:
        log.warning("scoring process died with %s; starting another one", death)
        self._metrics.observe_death()


def parts_of(batch: Sequence[Unit], num_processes: int, max_part: int) -> Iterator[list[Unit]]:
    """Cuts a batch, in order and between units, so that all processes get some of it."""
    number = sum(len(unit) for unit in batch)
    size = min(max(math.ceil(number / num_processes), MIN_PART), max_part)
    part: list[Unit] = []
    room = size
    for unit in batch:
        if part and len(unit) > room:
            yield part
            part, room = [], size
        part.append(unit)
        room -= len(unit)
    if part:
        yield part


@dataclass(eq=False)
class _Part:
    """Part of a batch that a process gets at a time."""

    units: Sequence[Unit]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def samples(self) -> list[EncodedSample]:
        return [sample for unit in self.units for sample in unit]


class _Died(Exception):
    """A process ended before it answered; says with which exit code or signal."""

    def __init__(self, how: str, late: bool = False) -> None:
        super().__init__(how)
        self.late = late


class _Worker:
    """Process of the pool, started when it is needed. Only one thread may use it at a time."""

    def __init__(self, make: Make, log_level: str, num_ahead: int) -> None:
        self._make = make
        self._log_level = log_level
        self._memories = [SharedMemory() for _ in range(1 + num_ahead)]
        self._num_handed = 0
        self._asked: deque[int] = deque()
        """Numbers of the parts that it has."""
        self._process: SpawnProcess | None = None
        self._pipe: Connection[Any, Any]
        self._death: _Died | None = None
        """Error of a process that could not restart. It gets no work until `answer` has reported it."""

    def started(self) -> _Worker:
        """Itself, with a process that is ready. Raises _Died."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            given = (theirs, self._memories, self._make, self._log_level)
            process = context.Process(target=_work, args=given, daemon=True)
            try:
                process.start()
            except OSError as error:
                self._pipe.close()
                raise _Died(f"no start: {error}") from error
            finally:
                theirs.close()
            self._process = process
            self._wait(START_S)
        return self

    def hand(self, samples: Sequence[EncodedSample], params: Any) -> None:
        """Gives it a part, within the number it decodes ahead. If it is gone, `answer` will say so."""
        if self._death is not None:
            return
        try:
            self.started()
        except _Died as death:
            self._death = death
            return
        # for a process of our own on this machine alone, as what the pipe carries is
        bare = pickle.dumps(([replace(sample, media=b"") for sample in samples], params))
        ends = self._memories[self._num_handed % len(self._memories)].write(
            [bare, *(sample.media for sample in samples)]
        )
        with suppress(OSError):
            self._pipe.send((self._num_handed, ends))
        self._asked.append(self._num_handed)
        self._num_handed += 1

    def answer(self, seconds: float) -> list[Outcome]:
        """Answer to the oldest open part. Raises _Died, or RuntimeError for a failure outside the scorer."""
        if self._death is not None:
            death, self._death = self._death, None
            raise death
        number: int
        outcomes: list[Outcome] | None
        number, outcomes = self._wait(seconds)
        if number != self._asked.popleft():
            raise RuntimeError("a scoring process answered what it was not asked")
        if outcomes is None:
            raise RuntimeError("a scoring process failed; the log has the reason")
        return outcomes

    def _wait(self, seconds: float) -> Any:
        """Waits for the process's next message. Kills it after so many seconds. Raises _Died."""
        assert self._process is not None
        is_late = False
        try:
            is_late = not self._pipe.poll(seconds)
            if not is_late:
                return self._pipe.recv()
            self._process.kill()
        except (EOFError, OSError):
            pass
        how = self._end(self._process)
        raise _Died(f"{how} after {seconds:g} s without an answer" if is_late else how, is_late)

    def close(self) -> None:
        self.end()
        for memory in self._memories:
            memory.close()

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._end(self._process)

    def _end(self, process: SpawnProcess) -> str:
        """Closes the pipe, waits for the end, and forgets the process. Says with which exit code or signal it ended."""
        self._asked.clear()
        self._pipe.close()
        process.join(END_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode or 0
        process.close()
        self._process = None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _work(pipe: Connection[Any, Any], memories: Sequence[SharedMemory], make: Make, log_level: str) -> None:
    """The life of a process: says that it is ready, then answers part after part until the pipe is closed."""
    keep_freed_memory()  # before there are threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's Ctrl-C: the parent drains and closes the pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging("reward", log_level)
    try:
        scorer = make()
        assert isinstance(scorer, Scorer)
        evaluate = Evaluator(scorer, 0)
    except Exception as error:
        log.exception("scoring process could not load its scorer: %s", error)
        sys.exit(1)
    handed: SimpleQueue[_Handed | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, memories, evaluate, handed), daemon=True).start()
    with suppress(OSError):  # the parent has closed the pipe, or is gone
        pipe.send(None)
        for number, begun in iter(handed.get, None):
            pipe.send((number, _finished(evaluate, begun)))


def _receive(
    pipe: Connection[Any, Any],
    memories: Sequence[SharedMemory],
    evaluate: Evaluator[Any],
    handed: SimpleQueue[_Handed | None],
) -> None:
    """Has each part decoded that comes, while another is scored, which has one of the memories."""
    num_ahead = len(memories) - 1
    begin = partial(_begun, evaluate, MAX_DECODED_PIXELS // num_ahead)
    try:
        with ThreadPoolExecutor(num_ahead, thread_name_prefix="decode") as threads:
            while True:
                number, ends = pipe.recv()
                handed.put((number, threads.submit(begin, memories[number % len(memories)].read(ends))))
    except (EOFError, OSError):
        pass  # the parent has closed the pipe, or is gone
    except Exception:
        log.exception("scoring process cannot accept more work")
    finally:
        handed.put(None)


def _begun(evaluate: Evaluator[Any], max_pixels: int, given: Sequence[bytes]) -> tuple[list[Part], Any]:
    bare, params = pickle.loads(given[0])
    samples = [replace(sample, media=media) for sample, media in zip(bare, given[1:], strict=True)]
    return evaluate.begin(samples, max_pixels), params


def _finished(evaluate: Evaluator[Any], begun: Future[tuple[list[Part], Any]]) -> list[Outcome] | None:
    try:
        return evaluate.finish(*begun.result())
    except Exception:
        log.exception("part failed outside the scorer")
        return None


def _end_with_parent() -> None:
    """Also in the middle of a part whose caller is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
