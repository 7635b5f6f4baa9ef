"""The stack of a chaos run: that of `flowfleet up`, with proxies on its wires, a small disk, and clocks to be set.

What differs is in the plan alone, so that the processes and their supervisor are those that everyone runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from flowfleet.job.files import data_folders
from flowfleet.job.spec import JobSpec
from flowfleet.local.plan import Kind, Plan, ProcessPlan, StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.ports import free_ports
from flowfleet.local.session import plan_stack
from flowfleet.local.stack import Stack, StackError, StateDir
from flowfleet.local.supervision.cleanup import end_stack
from flowfleet.local.supervision.supervisor import Supervisor
from tests.faults.job import MAX_BATCH
from tests.faults.reward import NAME
from tests.faults.tools.clocks import Clocks
from tests.faults.tools.control import Control
from tests.faults.tools.disk import SmallDisk
from tests.faults.tools.proxy import TcpProxy

HOST = "127.0.0.1"
SCORER = "ocr"
"""The reward whose place the chaos reward takes."""
REDIS_URL, TRAINER_REDIS_URL = "FLOWFLEET_REDIS_URL", "FLOWFLEET_TRAINER_REDIS_URL"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Tiny tensors gain nothing from more, and a forward's bits do not depend on the machine's cores."""
DEVICE = "FLOWFLEET_DEVICE"
START_TIMEOUT_S = 300.0


@dataclass
class ChaosStack:
    """A running stack and the means to hurt it."""

    stack: Stack
    plan: Plan
    state: StateDir
    control_file: Path
    clocks: Clocks
    disk: SmallDisk
    proxies: Mapping[str, TcpProxy] = field(default_factory=dict)
    """Proxies by link, such as "controller-reward" or "rollout-0-redis"."""


@contextlib.contextmanager
def chaos_stack(directory: Path, spec: JobSpec, poison: Mapping[str, str], clocks: Clocks) -> Iterator[ChaosStack]:
    """Runs a stack for the length of the block. Raises StackError where a process does not start."""
    options = _options(directory, spec)
    state = StateDir(options.state_dir)
    control_file = state.path / "reward.json"
    Control(poison).write(control_file)
    # Inherited by all processes: a machine with accelerators gives the same bits.
    with patch.dict(os.environ, {DEVICE: "cpu"}), state.lock(), SmallDisk(state.path / "jobs") as disk:
        end_stack(state)
        plan, proxies = wired(plan_stack(options), control_file, clocks, broadcasts=spec.trainer.mode == "full")
        with _running(plan, state, proxies, options.hang_s) as stack:
            yield ChaosStack(stack, plan, state, control_file, clocks, disk, proxies)


def _options(directory: Path, spec: JobSpec) -> StackOptions:
    return StackOptions(
        state_dir=directory,
        port=0,
        pools=(Pool(replicas=2, model=spec.model.path, dtype=spec.model.dtype, max_batch=MAX_BATCH),),
        rewards=(SCORER,),
        data_roots=data_folders(spec),
        start_timeout_s=START_TIMEOUT_S,
        hang_s=spec.timeouts.hang_s,
    )


def wired(
    plan: Plan, control_file: Path, clocks: Clocks, *, broadcasts: bool = False
) -> tuple[Plan, dict[str, TcpProxy]]:
    """The plan with a proxy on each link, the chaos reward and the clocks; and the proxies, not yet started.

    `broadcasts`: rollouts take weights by broadcast, and so keep the machine's clock.
    """
    wires, true = _Wires(plan), {Kind.REDIS, *([Kind.ROLLOUT] if broadcasts else [])}
    processes = [_rewired(process, wires, control_file) for process in plan.processes]
    clocked = [process if process.kind in true else _clocked(process, clocks) for process in processes]
    return dataclasses.replace(plan, processes=tuple(clocked)), wires.proxies


class _Wires:
    """Proxies in front of the ports of a plan, one a link."""

    def __init__(self, plan: Plan) -> None:
        self._ports = {process.name: int(process.address.rpartition(":")[2]) for process in plan.processes}
        self.proxies: dict[str, TcpProxy] = {}

    def address(self, link: str, target: str) -> str:
        """Where one end of a link must connect to reach the process `target`."""
        if link not in self.proxies:
            self.proxies[link] = TcpProxy(free_ports(1)[0], self._ports[target])
        return f"{HOST}:{self.proxies[link].port}"

    def redis_url(self, link: str, url: str) -> str:
        return url.replace(f"{HOST}:{self._ports['redis']}", self.address(link, "redis"))


def _rewired(process: ProcessPlan, wires: _Wires, control_file: Path) -> ProcessPlan:
    """The process with its connections led through proxies."""
    env, argv = dict(process.env), list(process.argv)
    if process.kind is not Kind.REDIS:
        env |= ONE_THREAD
    if REDIS_URL in env:
        env[REDIS_URL] = wires.redis_url(f"{process.name}-redis", env[REDIS_URL])
    if TRAINER_REDIS_URL in env:
        env[TRAINER_REDIS_URL] = wires.redis_url("trainer-redis", env[TRAINER_REDIS_URL])
    match process.kind:
        case Kind.ROLLOUT:
            argv += ["--advertise", wires.address(f"controller-{process.name}", process.name)]
        case Kind.REWARD:
            argv = argv[: argv.index("--scorer")]
            argv[argv.index("services.reward")] = "tests.faults.reward"
            argv += ["--control", str(control_file)]
        case Kind.CONTROLLER:
            own = next(place for place, word in enumerate(argv) if word.startswith(f"{SCORER}="))
            argv[own] = f"{NAME}={wires.address('controller-reward', f'reward-{SCORER}')}"
    return dataclasses.replace(process, argv=tuple(argv), env=env)


def _clocked(process: ProcessPlan, clocks: Clocks) -> ProcessPlan:
    """The process with a clock that can be set; a controller's trainers have the machine's."""
    env, argv = {**process.env, **clocks.environment(process.name)}, process.argv
    if process.kind is Kind.CONTROLLER and clocks.library is not None:
        argv = (*argv, "--trainer-python", str(clocks.python_without()))
    return dataclasses.replace(process, env=env, argv=argv)


@contextlib.contextmanager
def _running(plan: Plan, state: StateDir, proxies: Mapping[str, TcpProxy], hang_s: float) -> Iterator[Stack]:
    """Supervises the plan in a thread. The processes end with the block, and with this process."""
    stop, ready = threading.Event(), threading.Event()
    found: list[Stack] = []
    errors: list[BaseException] = []

    def serve(stack: Stack) -> None:
        found.append(stack)
        ready.set()

    def supervise() -> None:
        try:
            Supervisor(plan, state, start_timeout_s=START_TIMEOUT_S, hang_s=hang_s).run(stop, serve)
        except (StackError, OSError) as error:
            errors.append(error)
        finally:
            ready.set()

    for proxy in proxies.values():
        proxy.start()
    thread = threading.Thread(target=supervise, name=f"supervisor-{os.getpid()}")
    thread.start()
    try:
        ready.wait()
        if not found:
            raise errors[0] if errors else StackError("the stack ended while it started")
        yield found[0]
    finally:
        stop.set()
        for proxy in proxies.values():
            proxy.restore()
        thread.join()
        for proxy in proxies.values():
            proxy.close()
