"""Trainers as steps of `srun` over the nodes of the allocation: torchrun on each node, ranks on its accelerators.

The `srun` of a step is a process of this machine in a session of its own, with a record, so the next controller adopts
it as the local launcher does its trainers. Each attempt has a folder, `steps/trainer-JOB-NUMBER`: the wrapper on each
node notes the step's id and how the ranks ended there (flowfleet/slurm/step.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from flowfleet.errors import Unavailable
from flowfleet.job.spec import JobSpec
from flowfleet.local.files import read_own, write_atomically
from flowfleet.local.ports import free_ports
from flowfleet.local.stack import StackError
from flowfleet.process.commands import trainer_step_command
from flowfleet.process.forkserver import start_ticks
from flowfleet.process.logs import rotate
from flowfleet.process.service import TERMINATION_MESSAGE
from flowfleet.rpc.kinds import without_own
from flowfleet.slurm import tools
from flowfleet.slurm.allocation import Allocation
from flowfleet.slurm.head import ENDING, STEP_PREFIX
from flowfleet.slurm.step import EXIT, STEP
from flowfleet.slurm.steps import STEPS, Share, by_node, srun, write_step
from services.controller.platforms.local.launcher import LocalLauncher, TrainerProcess, environment, is_running

log = logging.getLogger(__name__)

GONE_S: Final = 20.0
"""Longest wait for Slurm to end a killed step."""
DRAIN_MARGIN_S: Final = 15.0
"""Part of the allocation's drain in which ranks end after their save."""
REPORTED_S: Final = 5.0
"""Longest wait for the other nodes once one has said how its ranks ended."""
POLL_S: Final = 0.2
LOST: Final = ("DOWN", "FAIL", "NOT_RESPONDING", "*")
_GO: Final = 'read -r go && exec "$@" </dev/null'
"""Starts nothing if the controller dies before it has noted the process."""


class SlurmLauncher(LocalLauncher):
    """`allocation` is of this run of the Slurm job. Processes of an earlier run are gone, whatever records say."""

    def __init__(self, state_dir: Path, allocation: Allocation) -> None:
        super().__init__(state_dir, sys.executable, allocation.trainer_devices)
        self._allocation = allocation

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        """Raises RuntimeError for a trainer that failed by itself, Unavailable for one that was ended by a node's
        failure, a preemption, the time limit or an operator."""
        try:
            return await super().ensure(job_id, spec)
        except RuntimeError as error:
            why = await asyncio.to_thread(self._why_ended, job_id)
            if why:
                raise Unavailable(f"the trainer ended: {why}") from None
            raise RuntimeError(str(error)) from None

    async def termination_message(self, job_id: str) -> str:
        """The trainer's own words; "" where something else ended it."""
        why = await asyncio.to_thread(self._why_ended, job_id)
        if why:
            return ""
        if words := await super().termination_message(job_id):
            return words
        codes = {node: code for node, code in self._exits(job_id).items() if code}
        return f"{', '.join(f'code {code} on {node}' for node, code in codes.items())}" if codes else ""

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        """Returns once Slurm has no such step any more, or after a while."""
        name = self._step_name(job_id)
        if at_once and name:
            await self._slurm(tools.end_steps, name)
        await super().stop(job_id, at_once=at_once)
        until = time.monotonic() + GONE_S
        while name and await self._slurm(self._is_left, name) and time.monotonic() < until:
            await self._slurm(tools.end_steps, name)
            await asyncio.sleep(POLL_S)

    def _runs(self, process: TrainerProcess) -> bool:
        """A trainer whose ranks have ended on one node is over, also while `srun` waits for a lost one."""
        return is_running(process) and not any(Path(process.port_file).parent.glob(f"{EXIT}.*"))

    def _warm(self) -> None:
        """Steps are not forked."""

    async def _start(self, job_id: str, spec: JobSpec) -> TrainerProcess:
        folder = self._new_folder(job_id)
        devices = self._table.of.get(job_id, ())[: spec.trainer.world_size]
        nodes = by_node(devices)
        first = self._allocation.node(next(iter(nodes)))
        port = free_ports(1, first.address if first == self._allocation.head else "127.0.0.1")[0]
        drain_s = max(5.0, self._allocation.drain_s - DRAIN_MARGIN_S)
        shares = {}
        for rank, (name, indices) in enumerate(nodes.items()):
            node = self._allocation.node(name)
            argv = trainer_step_command(
                sys.executable,
                nodes=len(nodes),
                node_rank=rank,
                ranks=len(indices),
                master=f"{first.address}:{port}",
                host=node.address,
                port_file=folder / "port",
                drain_s=drain_s,
            )
            shares[name] = Share(argv, indices if node.gpus else ())
        threads = spec.trainer.threads or max(1, first.cpus // max(1, self._places_on(first.name)))
        sent = without_own(os.environ)  # by srun itself
        env = {name: value for name, value in environment().items() if sent.get(name) != value}
        env |= {**self._variables(job_id, threads), TERMINATION_MESSAGE: str(folder / "words")}
        file = write_step(folder, env, shares)
        argv = srun(self._allocation, STEP_PREFIX + folder.name, list(nodes), file)
        process = self._spawn(job_id, argv, folder)
        log.info("trainer started", extra={"job": job_id, "step": folder.name, "devices": ",".join(devices)})
        return process

    def _spawn(self, job_id: str, argv: list[str], folder: Path) -> TrainerProcess:
        """The record is durable before the step starts."""
        self._log(job_id).parent.mkdir(parents=True, exist_ok=True)
        rotate(self._log(job_id))
        with self._log(job_id).open("ab") as output:
            child = subprocess.Popen(
                ["sh", "-c", _GO, "sh", *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=without_own(os.environ),
                start_new_session=True,
            )
        process = TrainerProcess(child.pid, start_ticks(child.pid), str(folder / "port"))
        write_atomically(self._file(job_id), json.dumps({**asdict(process), "run": self._allocation.key}))
        assert child.stdin is not None
        with child.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(b"go\n")
        return process

    def _read(self, job_id: str) -> TrainerProcess | None:
        try:
            record = json.loads(read_own(self._file(job_id)))
            if record.pop("run") != self._allocation.key:
                return None
            return TrainerProcess(**record)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("could not read a trainer's record: %s", error, extra={"job": job_id})
            return None

    def _words(self, job_id: str) -> Path:
        process = self._read(job_id)
        return Path(process.port_file).with_name("words") if process else super()._words(job_id)

    def _new_folder(self, job_id: str) -> Path:
        steps = self._state_dir / STEPS
        number = sum(1 for _ in steps.glob(f"trainer-{job_id}-*"))
        folder = steps / f"trainer-{job_id}-{number}-{secrets.token_hex(3)}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def _places_on(self, node: str) -> int:
        return sum(device.rpartition(":")[0] == node for device in self._allocation.trainer_devices)

    def _step_name(self, job_id: str) -> str:
        process = self._read(job_id)
        return STEP_PREFIX + Path(process.port_file).parent.name if process else ""

    def _exits(self, job_id: str) -> Mapping[str, int]:
        """Node → code with which its ranks ended; negative for a signal."""
        process = self._read(job_id)
        if process is None:
            return {}
        files = Path(process.port_file).parent.glob(f"{EXIT}.*")
        return {file.suffix[1:]: int(file.read_text()) for file in files}

    def _why_ended(self, job_id: str) -> str:
        """Names what else than the trainer itself ended it; "" for its own fault. Blocks."""
        process = self._read(job_id)
        if process is None or self._runs(process):
            return ""
        with contextlib.suppress(FileNotFoundError):
            return (self._state_dir / ENDING).read_text()
        folder = Path(process.port_file).parent
        nodes = [*json.loads(read_own(folder / "step.json"))["nodes"]]
        with contextlib.suppress(StackError):
            for name, facts in tools.node_facts(nodes).items():
                if any(word in facts.get("State", "") for word in LOST):
                    return f"node {name} is {facts['State']} in Slurm"
        until = time.monotonic() + REPORTED_S
        while {*nodes} > {*(exits := self._exits(job_id))} and is_running(process) and time.monotonic() < until:
            time.sleep(POLL_S)
        if (folder / "words").exists():
            return ""
        if silent := [node for node in nodes if node not in exits]:  # ranks elsewhere fail because of that
            return f"{', '.join(silent)} did not say how its ranks ended: the node or the step was lost"
        if any(code > 0 or code == -signal.SIGKILL for code in exits.values()):
            return ""
        step = next((file.read_text() for file in folder.glob(f"{STEP}.*")), "the step")
        return f"Slurm ended step {step}, by a preemption or `scancel`"

    def _is_left(self, job_id: str, names: list[str]) -> bool:
        return bool({*names} & tools.steps_of(job_id).keys())

    async def _slurm(self, ask: Callable[[str, list[str]], bool | None], name: str) -> bool:
        """Asks Slurm about a step of this allocation. One that gives no answer is asked again by later calls."""
        try:
            return bool(await asyncio.to_thread(ask, self._allocation.job_id, [name]))
        except StackError as error:
            log.warning("%s", error)
            return False
