"""A stack from start to stop: in the foreground, detached, or for the length of a `with` block."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

from flowfleet.errors import Unavailable
from flowfleet.hardware.accelerators import missing_devices, visible_devices
from flowfleet.local import secrets
from flowfleet.local.devices import DEVICES_FILE, Devices, pool_owner
from flowfleet.local.files import make_private, write_atomically
from flowfleet.local.placement import Placement, place
from flowfleet.local.plan import KEYS_FILE, Plan, StackOptions, make_plan, ports_needed
from flowfleet.local.pools import POOLS_FILE, Pool, given_twice, read_pools, write_pools
from flowfleet.local.ports import free_ports, is_free
from flowfleet.local.rewards import parse_reward
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.stack import RELOADED, RunningProcess, Stack, StackError, StateDir
from flowfleet.local.supervision.cleanup import end_stack
from flowfleet.local.supervision.health import PROBE_TIMEOUT_S, grpc_serves
from flowfleet.local.supervision.supervisor import Supervisor
from flowfleet.process.proxies import direct_to_loopback
from flowfleet.process.service import API_KEY, RPC_TOKEN
from flowfleet.proto.reward_pb2 import DescribeRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.redis.server import command
from flowfleet.rpc.tls import TLS_DIR

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
_STORED = "or `flowfleet pools remove` a pool that has it"
POLL_S = 0.05


def run_stack(options: StackOptions, stop: threading.Event, on_ready: Callable[[Stack], None]) -> None:
    """Supervises a stack in this process until `stop` is set. Ends first what an earlier crash left behind.

    Raises StackError where a stack runs in that state directory already, a port is taken, or a process does not start.
    """
    state = StateDir(options.state_dir)
    with state.lock():
        ended = end_stack(state)
        if ended:
            logger.warning("ended %d processes that an earlier stack left in %s", ended, state.path)
        plan = plan_stack(options)
        Supervisor(plan, state, start_timeout_s=options.start_timeout_s, hang_s=options.hang_s).run(stop, on_ready)


def plan_stack(options: StackOptions) -> Plan:
    """The plan with free ports, this machine's accelerators and fresh secrets."""
    if os.environ.get(TLS_DIR):
        raise StackError(f"a stack on one machine speaks on loopback alone, without TLS: unset {TLS_DIR}")
    if os.environ.get(API_KEY) and not options.key:
        raise StackError(f"{API_KEY} is set, so the controller would ask for that key: unset it, or leave out --no-key")
    if options.port and not is_free(options.port):
        raise StackError(f"port {options.port} is taken; give another --port (0 takes a free one)")
    state, passwords = StateDir(options.state_dir), StackSecrets() if options.key else StackSecrets(api_key="")
    options = _with_added(options, state)
    ports = free_ports(ports_needed(options))
    secrets.write(state.secrets, passwords.environments(ports[0]))
    write_atomically(state.path / KEYS_FILE, passwords.keys())
    make_private(state.redis)
    try:
        redis_argv = command(state.redis, ports[0], passwords.operator, passwords.redis, fsync="everysec")
    except Unavailable as error:
        raise StackError(str(error)) from None
    plan = make_plan(options, ports, redis_argv, passwords, place_stack(options))
    _record(plan, options, state)
    return plan


def place_stack(options: StackOptions) -> Placement:
    """The accelerators of this machine, shared out as the options say. StackError for one that is not there, or that is
    given twice."""
    owners, trainer = _owners(options.pools, options), options.trainer_devices
    named = [device for devices in owners.values() for device in devices]
    if problem := missing_devices([*named, *(trainer or ())]):
        flags = "--pool, --rollout-devices, --trainer-devices, --reward or FLOWFLEET_DEVICE"
        raise StackError(f"{problem}; change {flags}, {_STORED}")
    if device := given_twice(named):
        two = " and ".join(owner for owner, devices in owners.items() if device in devices)
        raise StackError(f"accelerator {device} is given twice, to {two}: give it to one of them, {_STORED}")
    is_given = trainer is not None and all(pool.devices is not None for pool in options.pools)
    taken = [device for devices in _owners((), options).values() for device in devices]
    available = () if is_given else visible_devices()
    return place(options.pools, [device for device in available if device not in taken], trainer)


def _owners(pools: Iterable[Pool], options: StackOptions) -> dict[str, tuple[str, ...]]:
    """Devices of pools and rewards."""
    rewards = {f"reward {reward.name}": reward.devices for reward in map(parse_reward, options.rewards)}
    return {pool_owner(pool.name): pool.devices or () for pool in pools} | rewards


def _with_added(options: StackOptions, state: StateDir) -> StackOptions:
    """Adds the pools that were added while an earlier stack ran."""
    names = {pool.name for pool in options.pools}
    known = read_pools(state.path / POOLS_FILE).values()
    added = [pool for pool in known if pool.added and pool.name not in names]
    return options.model_copy(update={"pools": (*options.pools, *added)})


def _record(plan: Plan, options: StackOptions, state: StateDir) -> None:
    """Writes which pools run, and whose the accelerators are."""
    write_pools(state.path / POOLS_FILE, plan.placement.pools)
    owners, of_trainers = _owners(plan.placement.pools, options), set(plan.placement.trainer)
    lent = {owner: [one for one in devices if one not in of_trainers] for owner, devices in owners.items()}
    Devices(state.path / DEVICES_FILE).begin(lent, trainers_take_more=options.trainer_devices is None)


def stop_on_signals(stop: threading.Event) -> None:
    """SIGINT and SIGTERM set `stop`. Main thread only."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def start_detached(options: StackOptions) -> Stack:
    """Starts a supervisor in the background and returns once every process serves. Raises StackError."""
    supervisor = _spawn(options, subprocess.DEVNULL)
    try:
        return _await_ready(supervisor, options)
    except KeyboardInterrupt:
        supervisor.terminate()
        raise


@contextlib.contextmanager
def local_stack(options: StackOptions) -> Iterator[Stack]:
    """A stack for the length of the block; it ends as well when this process does, however that happens."""
    supervisor = _spawn(options, subprocess.PIPE, "--exit-with-stdin")
    try:
        yield _await_ready(supervisor, options)
    finally:
        if supervisor.stdin is not None:
            supervisor.stdin.close()
        supervisor.wait(STOP_TIMEOUT_S)


def stop_stack(state: StateDir) -> bool:
    """Ends the stack of a state directory, live or left behind. False where there was nothing to end."""
    if not state.path.exists():
        return False
    state.make()
    supervisor = state.supervisor_pid()
    if supervisor is None:
        with state.lock():
            return end_stack(state) > 0
    os.kill(supervisor, signal.SIGTERM)
    os.kill(supervisor, signal.SIGCONT)  # where it was suspended
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while state.supervisor_pid() == supervisor:
        if time.monotonic() > deadline:
            raise StackError(f"the supervisor (pid {supervisor}) does not stop; its log is {state.log('supervisor')}")
        time.sleep(POLL_S)
    return True


def restart_process(state: StateDir, name: str, timeout_s: float) -> RunningProcess:
    """Ends one process of a stack, which the supervisor starts again, and returns it once it serves. Raises
    StackError."""
    before, deadline = state.read(), time.monotonic() + timeout_s
    if before is None:
        raise StackError(f"no stack runs in {state.path}: in a cluster restart the Deployment of the service")
    if name not in before.processes:
        raise StackError(f"the stack has no {name}; it has {', '.join(sorted(before.processes))}")
    os.kill(before.processes[name].pid, signal.SIGTERM)
    while (now := state.read()) is not None and time.monotonic() < deadline:
        process = now.processes[name]
        with contextlib.suppress(grpc.RpcError):
            if process.pid != before.processes[name].pid and grpc_serves(process.address, PROBE_TIMEOUT_S):
                return process
        time.sleep(POLL_S)
    raise StackError(f"{name} does not serve again; the end of {state.log(name)}:\n{state.log_tail(name)}")


def reload_reward(state: StateDir, name: str, timeout_s: float) -> int:
    """Starts a reward again and accepts the version that it has then for the jobs of the stack. Returns its pid."""
    file = state.path / RELOADED
    before = json.loads(file.read_text()) if file.exists() else {}
    write_atomically(file, json.dumps({**before, name: ""}))  # a job may ask it before its version is known here
    try:
        process = restart_process(state, f"reward-{name}", timeout_s)
        token = ("authorization", f"Bearer {secrets.read(state.secrets, 'reward')[RPC_TOKEN]}")
        with grpc.insecure_channel(process.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            asked = RewardServiceStub(channel).Describe(DescribeRequest(), timeout=PROBE_TIMEOUT_S, metadata=(token,))
        before[name] = asked.version
    finally:
        write_atomically(file, json.dumps(before))
    return process.pid


def _spawn(options: StackOptions, stdin: int, *flags: str) -> subprocess.Popen[str]:
    """A supervisor in a session of its own. It closes its stderr when ready, and says there why if it cannot be.

    Neither it nor its children import from the current folder, which may hold a `services` of the user's.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "flowfleet.local", options.model_dump_json(), *flags],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **direct_to_loopback(os.environ), "PYTHONSAFEPATH": "1"},
        start_new_session=True,
        text=True,
    )


def _await_ready(supervisor: subprocess.Popen[str], options: StackOptions) -> Stack:
    assert supervisor.stderr is not None
    with supervisor.stderr as errors:
        message = errors.read().strip()
    stack = StateDir(options.state_dir).read()
    if stack is None or stack.supervisor != supervisor.pid:
        raise StackError(message or f"the supervisor ended with code {supervisor.wait()}")
    return stack
