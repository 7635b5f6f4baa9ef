"""Walks a schedule on a running job: waits for a fault's step and phase, strikes, heals, waits for the job to continue.

One fault at a time: the next one comes when the job has finished a step after the last one. So each recovery time
belongs to one fault. A fault that finds nothing to strike is tried again for a while.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import redis

from flowfleet.api.problems import ApiError
from flowfleet.client.client import Client
from flowfleet.local.supervision.health import serves
from tests.faults.faults import STRIKES, Struck
from tests.faults.schedule import Fault
from tests.faults.stack import SCORER
from tests.faults.targets import Missed, Targets
from tests.faults.watch import Sight

STUCK_S = 180.0
"""A job that finishes no step for so long has not survived."""
PHASE_S = 20.0
"""Longest wait for the wished phase, if the job does not pass a checkpoint before; then the fault strikes in whatever
phase there is."""
TRY_S = 60.0
"""Longest wait for something to strike."""
RETRY_S = 0.1
REPLACED_S = 60.0
"""What the replacement of a hung process may take beyond `timeouts.hang_s`."""
POLL_S = 0.02
NO_ROOM = "no room"
"""In the reason of a job that waits for room for its checkpoint."""
HELD = ("paused", "quarantined")
LOOK_S = 1.0
"""Interval between looks at a job that makes no progress: a paused one is resumed."""


@dataclass
class Entry:
    """A fault as it was done."""

    number: int
    kind: str
    target: str
    what: str = ""
    at_s: float = 0.0
    """Seconds from the start of the run to the strike."""
    step: int = 0
    phase: str = ""
    """Phase of the job at the strike."""
    counted: bool = False
    """It hit a live target of a job that had not ended."""
    recovery_s: float | None = None
    """Seconds from the strike until the job had finished another step."""
    replaced_s: float | None = None
    """Seconds until a process that hung for good was replaced."""
    failures: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Stuck(Exception):
    """The job ended too early or makes no progress; the message describes its last state."""


class Injector:
    def __init__(self, targets: Targets, client: Client, started: float) -> None:
        self._targets = targets
        self._client = client
        self._started = started

    def run(self, schedule: Sequence[Fault]) -> list[Entry]:
        """Does all faults, and prints each. Raises Stuck."""
        entries: list[Entry] = []
        for fault in schedule:
            self._wait_for_step(fault.step)
            entries.append(entry := self._do(fault))
            print(f"{sum(one.counted for one in entries)}/{len(schedule)} {told(entry)}", flush=True)
            if entry.counted and entry.recovery_s is None and not self._targets.watch.now.ended:
                raise Stuck(entry.failures[-1] if entry.failures else "the job makes no progress: see its reason")
        return entries

    # -- one fault -----------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> Entry:
        entry = Entry(fault.number, fault.kind, fault.target)
        struck = self._strike(fault, entry)
        if struck is None:
            return entry
        struck_at, step = time.monotonic(), entry.step
        entry.what, entry.data = struck.what, struck.data
        entry.counted = not self._targets.watch.now.ended
        try:
            self._hold(fault, struck, entry)
        except (OSError, redis.RedisError, psutil.Error, TimeoutError) as error:
            entry.failures.append(f"it was not ended: {type(error).__name__}: {error}")
        if struck.replaced is not None:
            self._wait_for_replacement(struck.replaced, entry, struck_at)
        self._wait_for_recovery(entry, step, struck_at)
        if struck.wake is not None:
            struck.wake()
        return entry

    def _strike(self, fault: Fault, entry: Entry) -> Struck | None:
        """Strikes in the wished phase, or says in the entry why not."""
        deadline, missed = time.monotonic() + TRY_S, ""
        while time.monotonic() < deadline:
            if self._targets.watch.now.ended:
                break
            if not self._serves(fault.target):
                missed = f"{fault.target} does not serve"
                time.sleep(RETRY_S)
                continue
            sight = self._wait_for_phase(fault)
            try:
                struck = STRIKES[fault.kind](self._targets, fault)
            except (Missed, redis.RedisError, OSError, psutil.Error) as error:
                missed = str(error)
                time.sleep(RETRY_S)
                continue
            entry.step, entry.phase = sight.step, sight.phase
            entry.at_s = round(time.monotonic() - self._started, 2)
            return struck
        entry.failures.append(f"nothing was struck: {missed or 'the job has ended'}")
        return None

    def _serves(self, target: str) -> bool:
        """Whether a service that a fault names answers. A trainer is asked by the job itself."""
        kind = target.partition("/")[0]
        names = {"reward": f"reward-{SCORER}", "controller": "controller", "redis": "redis"}
        plan = self._targets.chaos.plan
        wanted = [
            p for p in plan.processes if p.name == names.get(kind) or (kind == "rollout" and p.name.startswith(kind))
        ]
        return not wanted or any(serves(process, plan) for process in wanted)

    def _wait_for_phase(self, fault: Fault) -> Sight:
        """Waits for the wished phase. Each phase comes once before the next checkpoint is passed, but a job of short
        steps may have left it before it was seen."""
        watch = self._targets.watch
        last = watch.now.step + self._targets.spec.schedule.save_every
        watch.until(lambda sight: sight.ended or sight.step > last or self._is_time(fault, sight), PHASE_S)
        return watch.now

    def _is_time(self, fault: Fault, sight: Sight) -> bool:
        """Whether the job is in the wished phase. A disk is filled in the step before a checkpoint, which then finds
        it full."""
        if fault.kind == "full-disk":
            return (sight.step + 1) % self._targets.spec.schedule.save_every == 0
        return sight.phase == fault.phase

    def _hold(self, fault: Fault, struck: Struck, entry: Entry) -> None:
        if struck.heal is None:
            return
        if fault.kind == "full-disk" and self._targets.watch.until(lambda sight: NO_ROOM in sight.reason, PHASE_S):
            entry.phase = fault.phase
        time.sleep(fault.seconds)
        struck.heal()

    # -- what follows --------------------------------------------------------------------------------------------

    def _wait_for_step(self, step: int) -> None:
        watch = self._targets.watch
        if not self._until(lambda sight: sight.step >= step):
            raise Stuck(f"step {step} was not reached within {STUCK_S:g} s: {seen(watch.now)}")
        if watch.now.ended:
            raise Stuck(f"the job ended before step {step}: {seen(watch.now)}")

    def _wait_for_replacement(self, process: psutil.Process, entry: Entry, struck_at: float) -> None:
        patience = self._targets.spec.timeouts.hang_s + REPLACED_S
        while time.monotonic() < struck_at + patience:
            if _is_gone(process):
                entry.replaced_s = round(time.monotonic() - struck_at, 2)
                return
            time.sleep(POLL_S)
        entry.failures.append(f"{entry.target} hung and was not replaced within {patience:g} s")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    def _wait_for_recovery(self, entry: Entry, step: int, struck_at: float) -> None:
        if self._until(lambda sight: sight.step > step, entry):
            entry.recovery_s = round(self._targets.watch.now.at - struck_at, 2)
            return
        entry.failures.append(f"no step was finished within {STUCK_S:g} s: {seen(self._targets.watch.now)}")

    def _until(self, condition: Callable[[Sight], bool], entry: Entry | None = None) -> bool:
        """Waits for a condition or the job's end; resumes a job that was paused. False after `STUCK_S`."""
        watch, deadline = self._targets.watch, time.monotonic() + STUCK_S
        while time.monotonic() < deadline:
            if watch.until(lambda sight: sight.ended or condition(sight), LOOK_S):
                return True
            if watch.now.status in HELD:
                self._resume(entry, watch.now)
        return False

    def _resume(self, entry: Entry | None, sight: Sight) -> None:
        """Resumes a held job. A job pauses when memory is short; it should never be quarantined."""
        print(f"resuming the job, which is {sight.status}: {sight.reason}")
        if entry is not None and sight.status != "paused":
            entry.failures.append(f"the job was {sight.status}: {sight.reason}")
        try:
            self._client.resume(self._targets.job_id)
        except ApiError as error:
            print(f"resume failed: {error}")


def told(entry: Entry) -> str:
    """Describes a fault in one line."""
    recovery = "not recovered" if entry.recovery_s is None else f"recovered in {entry.recovery_s:.1f} s"
    failures = "".join(f"; FAILURE: {text}" for text in entry.failures)
    where = f"{entry.target} in step {entry.step} ({entry.phase})"
    return f"{entry.kind} {where}: {entry.what or 'missed'}; {recovery}{failures}"


def seen(sight: Sight) -> str:
    """The job in a few words."""
    reason = f": {sight.reason}" if sight.reason else ""
    return f"the job was {sight.status} in step {sight.step} ({sight.phase}){reason}"


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
