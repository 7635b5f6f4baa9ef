"""Adds and removes rollout pools of a stack while it runs: by pools.json, which its supervisor follows.

A pool has its devices from the moment that it is added until its last process has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import grpc

from flowfleet.hardware.accelerators import missing_devices, visible_devices
from flowfleet.local.devices import ADDED, DEVICES_FILE, Devices, pool_owner
from flowfleet.local.pools import POOLS_FILE, Pool, read_pools, write_pools
from flowfleet.local.stack import RunningProcess, Stack, StackError, StateDir
from flowfleet.local.supervision.health import PROBE_TIMEOUT_S, grpc_serves

POLL_S = 0.05
REMOVE_S = 60.0


def add_pool(state: StateDir, pool: Pool, timeout_s: float) -> dict[str, RunningProcess]:
    """Adds a pool, and returns its processes once they serve. Raises StackError; then there is no such pool."""
    if (stack := state.read()) is None:
        raise StackError(
            f"no stack runs in {state.path}: start one by `flowfleet up --pool`; on Kubernetes set `pools.{pool.name}` "
            "in the chart's values"
        )
    with Devices(state.path / DEVICES_FILE).changing() as owners:
        pools = read_pools(state.path / POOLS_FILE)
        if pool.name in pools or _processes(stack, pool.name):
            raise StackError(f"the stack has a pool {pool.name!r}: choose another name, or remove that pool first")
        devices = _devices(pool, pools, owners)
        owners.update({pool_owner(pool.name): devices} if devices else {})
        placed = pool.model_copy(update={"devices": devices or None, "added": True})
        write_pools(state.path / POOLS_FILE, (*pools.values(), placed))
    try:
        return _until_served(state, pool, timeout_s)
    except BaseException:
        with contextlib.suppress(StackError):
            remove_pool(state, pool.name)
        raise


def remove_pool(state: StateDir, name: str) -> None:
    """Returns once the pool's processes have ended and its devices are free. Raises StackError."""
    with Devices(state.path / DEVICES_FILE).changing():
        pools = read_pools(state.path / POOLS_FILE)
        if name not in pools:
            has = ", ".join(sorted(pools)) or "none"
            raise StackError(
                f"the stack in {state.path} has no pool {name!r} but {has}; on Kubernetes remove `pools.{name}` from "
                "the chart's values"
            )
        write_pools(state.path / POOLS_FILE, [pool for pool in pools.values() if pool.name != name])
    deadline = time.monotonic() + REMOVE_S
    while (stack := state.read()) is not None and (left := _processes(stack, name)):
        if time.monotonic() > deadline:
            raise StackError(f"{', '.join(left)} did not end in {REMOVE_S:.0f} s; see {state.log('supervisor')}")
        time.sleep(POLL_S)


def _devices(pool: Pool, pools: Mapping[str, Pool], owners: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Accelerators of a new pool: those that it names, or the first free ones."""
    taken = {device: owner for owner, devices in owners.items() if owner != ADDED for device in devices}
    taken |= {device: pool_owner(one.name) for one in pools.values() for device in one.devices or ()}
    asked, count = pool.devices or (), pool.replicas * pool.sequence_parallel_size
    if problem := missing_devices(asked):
        raise StackError(f"{problem}: change the pool's devices")
    if device := next((device for device in asked if device in taken), ""):
        owner = taken[device] if " " in taken[device] else f"job {taken[device]}"
        raise StackError(f"accelerator {device} is not free, {owner} has it: give the pool other devices")
    visible = visible_devices()
    free = [device for device in visible if device not in taken]
    if visible and not asked and len(free) < count:
        raise StackError(f"pool {pool.name} needs {count} accelerators, but free are only: {', '.join(free) or 'none'}")
    return asked or tuple(free[:count])


def _processes(stack: Stack, pool: str) -> dict[str, RunningProcess]:
    return {name: process for name, process in stack.processes.items() if process.pool == pool}


def _until_served(state: StateDir, pool: Pool, timeout_s: float) -> dict[str, RunningProcess]:
    deadline, first = time.monotonic() + timeout_s, dict[str, int]()
    while (stack := state.read()) is not None and time.monotonic() < deadline:
        processes = _processes(stack, pool.name)
        for name, process in processes.items():
            if process.pid != first.setdefault(name, process.pid) and first[name] != 0:
                raise StackError(f"{name} ended while it started; the end of its log:\n{state.log_tail(name)}")
            first[name] = process.pid
        with contextlib.suppress(grpc.RpcError):
            addresses = [process.address for process in processes.values()]
            if len(processes) == pool.replicas and all(grpc_serves(one, PROBE_TIMEOUT_S) for one in addresses):
                return processes
        time.sleep(POLL_S)
    raise StackError(f"pool {pool.name} does not serve after {timeout_s:.0f} s, so it was removed again")
