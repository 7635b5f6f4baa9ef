"""Starts, finds again and stops the trainers of jobs as local process groups.

The launcher is level-triggered as the state machine is: `ensure` gives the address of a live trainer, adopting the
one that an earlier controller started. What it knows is in `<state_dir>/trainers/<job>.json`, so that `flowfleet
down` can end what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flowfleet.hardware.accelerators import show_only
from flowfleet.job.spec import JobSpec
from flowfleet.local.devices import DEVICES_FILE, Devices
from flowfleet.local.files import read_own, write_atomically
from flowfleet.process.commands import TRAINER, trainer_flags
from flowfleet.process.forks import fork_environment
from flowfleet.process.forkserver import Order, start_ticks
from flowfleet.process.logs import cap, rotate
from flowfleet.process.service import STATE_DIR, TERMINATION_MESSAGE, THREADS, usable_cpus
from flowfleet.rpc.kinds import job_accept, job_secrets, trainer_environment
from services.controller.platforms.local.fork_server import TrainerForks

log = logging.getLogger(__name__)

POLL_S = 0.05
START_TIMEOUT_S = 300.0
PLACES = 2
"""Ranks of trainers at once on a machine without accelerators."""
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class TrainerProcess:
    """Record of a started trainer. `started` (kernel ticks since boot) tells a reused pid from ours."""

    pid: int
    started: str
    port_file: str


class LocalLauncher:
    """Trainers as process groups of this machine, each on `world_size` of the `devices`. None given: wherever torch
    goes, and as many ranks at once as there are `places`."""

    def __init__(
        self, state_dir: Path, python: str = sys.executable, devices: Sequence[str] = (), places: int = PLACES
    ) -> None:
        self._state_dir = state_dir.resolve()
        self._table = Devices(self._state_dir / DEVICES_FILE, devices or tuple(map(str, range(places))))
        self._directory = state_dir / "trainers"
        self._logs = state_dir / "logs"
        self._devices = devices
        with contextlib.suppress(OSError):  # there is none yet, or it is another user's: its records are not believed
            self._directory.chmod(0o700)  # so that records are believed which an earlier release let others write
        self._forks = TrainerForks(python, environment, self._logs / "trainers.log", TRAINER)

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        process = self._read(job_id)
        if process is None or not self._runs(process):
            await self.stop(job_id)
            if problem := device_problem(spec, self._table.names if self._devices else ()):
                raise ValueError(problem)
            process = await self._start(job_id, spec)
        async with asyncio.timeout(START_TIMEOUT_S):
            while self._runs(process):
                if (address := _read_if_there(process.port_file)) is not None:
                    self._warm()
                    return address
                await asyncio.sleep(POLL_S)
        words = await self.termination_message(job_id) or "it left no message"
        raise RuntimeError(f"the trainer ended while starting: {words}; its log is {self._log(job_id)}")

    async def alive(self, job_id: str) -> bool:
        cap(self._log(job_id))
        process = self._read(job_id)
        return process is not None and self._runs(process)

    def placed(self, job_id: str) -> bool:
        return True

    async def termination_message(self, job_id: str) -> str:
        return (_read_if_there(str(self._words(job_id))) or "").strip()

    async def ended(self, job_id: str) -> None:
        return  # `stop` waits for it

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        process = self._read(job_id)
        if process is not None:
            await _end_group(process, 0.0 if at_once else STOP_TIMEOUT_S)
            self._file(job_id).unlink(missing_ok=True)

    async def keep_only(self, job_ids: Collection[str]) -> None:
        for path in self._directory.glob("*.json"):
            if path.stem not in job_ids:
                log.warning("stopped the trainer of an ended job", extra={"job": path.stem})
                await self.stop(path.stem)

        self._table.keep_only(job_ids)

    @property
    def admitted(self) -> Collection[str]:
        return self._table.of.keys()

    async def admit(self, job_id: str, spec: JobSpec) -> str:
        """A trainer of more ranks than there are places is alone on a CPU; one of more than devices never starts."""
        return self._table.take(job_id, spec.trainer.world_size)

    async def leave(self, job_id: str) -> None:
        self._table.leave(job_id)

    def _runs(self, process: TrainerProcess) -> bool:
        return is_running(process)

    def _warm(self) -> None:
        """Has a process ready for the next trainer, also where this one was adopted."""
        self._forks.warm()

    async def _start(self, job_id: str, spec: JobSpec) -> TrainerProcess:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._log(job_id).parent.mkdir(parents=True, exist_ok=True)
        rotate(self._log(job_id))
        port_file = self._directory / f"{job_id}.port"
        port_file.unlink(missing_ok=True)
        self._words(job_id).unlink(missing_ok=True)
        at_once = max(spec.trainer.world_size, 1 if self._devices else len(self._table.names))
        threads = spec.trainer.threads or max(1, usable_cpus() // at_once)
        devices = self._table.of.get(job_id, self._devices)[: spec.trainer.world_size] if self._devices else ()
        env = {**environment(), **self._variables(job_id, threads), **show_only(devices)}
        order = Order(TRAINER, trainer_flags(port_file), env, ranks=spec.trainer.world_size)

        def note(pid: int, started: str) -> None:
            self._write(job_id, TrainerProcess(pid, started, str(port_file)))

        await self._forks.fork(order, self._log(job_id), note)  # it outlives a killed controller, which finds it again
        process = self._read(job_id)
        assert process is not None
        log.info("trainer started", extra={"job": job_id, "pid": process.pid, "devices": ",".join(devices)})
        return process

    def _write(self, job_id: str, process: TrainerProcess) -> None:
        write_atomically(self._file(job_id), json.dumps(asdict(process)))

    def _variables(self, job_id: str, threads: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(threads),
            THREADS: str(threads),
            STATE_DIR: str(self._state_dir),
            TERMINATION_MESSAGE: str(self._words(job_id).resolve()),
            **job_accept(job_id),
            **job_secrets(job_id),
        }

    def _read(self, job_id: str) -> TrainerProcess | None:
        try:
            return TrainerProcess(**json.loads(read_own(self._file(job_id))))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:  # a power cut may leave it empty; one that lives is fenced
            log.warning("could not read a trainer's record: %s", error, extra={"job": job_id})
            return None

    def _words(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.words"

    def _file(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _log(self, job_id: str) -> Path:
        return self._state_dir / "jobs" / job_id / "logs" / "trainer.log"


def environment() -> dict[str, str]:
    """Environment of the process that trainers are forked from."""
    return fork_environment(trainer_environment(os.environ))


def device_problem(spec: JobSpec, devices: Sequence[str]) -> str | None:
    """Why a job's trainer cannot run on these accelerators; None where it can, or where none were assigned."""
    ranks = spec.trainer.world_size
    if not devices or ranks <= len(devices):
        return None
    return (
        f"trainer.world_size = {ranks}: trainers have {len(devices)} accelerators here ({', '.join(devices)}), one a "
        f"rank; set it to at most {len(devices)}, or give the controller more --trainer-devices"
    )


def _read_if_there(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        return None


def is_running(process: TrainerProcess) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)  # reaps it if it was our child
    return process.started != "" and start_ticks(process.pid) == process.started


async def _end_group(process: TrainerProcess, grace_s: float) -> None:
    """SIGTERM to the whole group, SIGKILL to what is left of it after `grace_s`."""
    if not is_running(process):
        if start_ticks(process.pid) == "":  # else the pid is somebody else's by now
            _signal_group(process.pid, signal.SIGKILL)
            await _reap(process.pid)
        return
    if grace_s > 0:
        _signal_group(process.pid, signal.SIGTERM)
    for _ in range(int(grace_s / POLL_S)):
        if not is_running(process):
            break
        await asyncio.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    await _reap(process.pid)


async def _reap(pid: int) -> None:
    """A child that was killed: while threads of it are ending it cannot be waited for, though it is no more running."""
    for _ in range(int(STOP_TIMEOUT_S / POLL_S)):
        if _is_reaped(pid):
            return
        await asyncio.sleep(POLL_S)


def _is_reaped(pid: int) -> bool:
    """Or was no child of ours."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
