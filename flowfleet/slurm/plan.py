"""The plan of a local stack, moved onto the nodes of an allocation.

Redis and the controller stay processes of the first node. Rollouts and rewards become steps. Every address on loopback
becomes its node's, everything speaks TLS, and what a step may not show in a command line goes into its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowfleet.local import secrets
from flowfleet.local.devices import DEVICES_FILE, Devices, pool_owner
from flowfleet.local.files import make_private, write_atomically
from flowfleet.local.placement import Placement, place
from flowfleet.local.plan import HOST, KEYS_FILE, Kind, Plan, ProcessPlan, StackOptions, make_plan, ports_needed
from flowfleet.local.pools import POOLS_FILE, Pool, write_pools
from flowfleet.local.rewards import parse_reward
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.stack import MARK, StackError, StateDir
from flowfleet.redis.client import REDIS_CA
from flowfleet.redis.server import command
from flowfleet.rpc.authority import write_certificates
from flowfleet.rpc.kinds import OF_TRAINERS
from flowfleet.rpc.tls import TLS_DIR
from flowfleet.slurm.allocation import ALLOCATION_FILE, Allocation, Node
from flowfleet.slurm.steps import STEPS, Share, by_node, srun, write_step

TLS_FOLDER: Final = "tls"
ROLLOUT_DRAIN_S: Final = "10"
"""Drain of a rollout's step: a fleet that ends has no use for unfinished samples."""

_LOOPBACK: Final = re.compile(rf"(?P<scheme>[a-z]+://)?(?P<user>[^@/\s=]*@)?(?<![\d.]){re.escape(HOST)}:(?P<port>\d+)")


def num_ports(options: StackOptions) -> int:
    """Ports of a local stack, a third one for the health of each rollout and reward, and a few in reserve."""
    return 2 * ports_needed(options)


def plan_fleet(options: StackOptions, allocation: Allocation, ports: Sequence[int], redis_dir: Path) -> Plan:
    """The plan, with its secrets, certificates and tables written. Raises StackError."""
    state, passwords = StateDir(options.state_dir), StackSecrets() if options.key else StackSecrets(api_key="")
    if options.pools and any(pool.devices is not None for pool in options.pools):
        raise StackError("on Slurm the fleet gives rollouts their accelerators: leave out devices of pools")
    placement = place_on_nodes(options, allocation)
    tls = state.path / TLS_FOLDER
    make_private(tls)
    write_certificates(tls, dict.fromkeys((allocation.head.name, allocation.head.address)))
    make_private(redis_dir)
    argv = command(
        redis_dir,
        ports[0],
        passwords.operator,
        passwords.redis,
        fsync="everysec",
        host=allocation.head.address,
        tls=tls / "redis",
    )
    at = {ports[0]: allocation.head.address}
    given = passwords.environments(ports[0])
    environments = {kind: {name: _at(value, at) for name, value in given[kind].items()} for kind in given}
    secrets.write(state.secrets, environments)
    write_atomically(state.path / KEYS_FILE, passwords.keys())
    needed = ports_needed(options)
    local = make_plan(options, ports[:needed], argv, passwords, replace(placement, trainer=()))
    moved = _moved(local, placement, allocation, state, ports[needed:])
    write_pools(state.path / POOLS_FILE, placement.pools or options.pools)
    lent = {pool_owner(pool.name): pool.devices or () for pool in placement.pools}
    Devices(state.path / DEVICES_FILE).begin(lent, trainers_take_more=False)
    allocation.model_copy(update={"trainer_devices": placement.trainer}).write(state.path)
    return moved


def place_on_nodes(options: StackOptions, allocation: Allocation) -> Placement:
    """Rollouts take the last accelerators, from the last node on, and trainers the others. Without accelerators every
    node has places for trainers."""
    rewards = {f"{allocation.head.name}:{device}" for text in options.rewards for device in parse_reward(text).devices}
    every = [f"{node.name}:{index}" for node in allocation.nodes for index in range(node.gpus)]
    if absent := rewards.difference(every):
        raise StackError(f"a reward asks for accelerator {', '.join(sorted(absent))}, which the job does not have")
    every = [device for device in every if device not in rewards]
    if not every:
        places = [f"{node.name}:{place}" for node in allocation.nodes for place in range(options.trainers)]
        return Placement(trainer=tuple(places))
    wanted = sum(pool.replicas * pool.sequence_parallel_size for pool in options.pools)
    if wanted >= len(every):
        raise StackError(
            f"the rollouts want {wanted} of the job's {len(every)} accelerators, which leaves none to trainers: "
            "ask for fewer --rollouts or more nodes"
        )
    placed = place(options.pools, every[::-1])
    for pool in placed.pools:
        for start in range(0, len(pool.devices or ()), pool.sequence_parallel_size):
            chosen = (pool.devices or ())[start : start + pool.sequence_parallel_size]
            if len(by_node(chosen)) > 1:
                raise StackError(
                    f"a rollout of pool {pool.name} would share its samples over two nodes: {', '.join(chosen)}"
                )
    return Placement(placed.pools, tuple(device for device in every if device not in placed.rollouts))


def _moved(plan: Plan, placement: Placement, allocation: Allocation, state: StateDir, spare: Sequence[int]) -> Plan:
    health = iter(spare)
    nodes: dict[str, Node] = {}
    for index, process in enumerate(plan.processes):
        nodes[process.name] = _node_of(process, index, allocation)
    where = {port: nodes[one.name].address for one in plan.processes for port in _ports(one)}
    processes = [_process(process, nodes[process.name], where, allocation, state, health) for process in plan.processes]
    ca = str(state.path / TLS_FOLDER / "redis" / "ca.crt")
    return replace(
        plan,
        processes=tuple(processes),
        url=_at(plan.url, where),
        redis_url=f"{_at(plan.redis_url, where)}?ssl_ca_certs={ca}",
        ca=ca,
        placement=placement,
        of_pool=partial(_added, plan, allocation, state),
    )


def _added(plan: Plan, allocation: Allocation, state: StateDir, pool: Pool, ports: Iterator[int]) -> list[ProcessPlan]:
    raise StackError(f"pool {pool.name}: pools cannot be added on Slurm yet; give them to `flowfleet slurm up --up`")


def _node_of(process: ProcessPlan, index: int, allocation: Allocation) -> Node:
    if process.kind is not Kind.ROLLOUT:
        return allocation.head
    if process.devices:
        return allocation.node(next(iter(by_node(process.devices))))
    return allocation.nodes[-1 - (index % len(allocation.nodes))]


def _process(
    process: ProcessPlan,
    node: Node,
    where: Mapping[int, str],
    allocation: Allocation,
    state: StateDir,
    health: Iterator[int],
) -> ProcessPlan:
    changed: dict[str, Any] = {"address": _at(process.address, where)}
    if process.kind is Kind.REDIS:
        return replace(process, **changed)
    tls, ca = state.path / TLS_FOLDER, str(state.path / TLS_FOLDER / "redis" / "ca.crt")
    env = {name: _at(value, where) for name, value in process.env.items()}
    env |= {TLS_DIR: str(tls / process.kind.value), REDIS_CA: ca, "FLOWFLEET_CA": ca}
    argv = [_at(word, where) if word != HOST else node.address for word in process.argv]
    changed["metrics"] = process.metrics and _at(process.metrics, where)
    if process.kind is Kind.CONTROLLER:
        env |= {OF_TRAINERS + TLS_DIR.removeprefix("FLOWFLEET_"): str(tls / "trainer")}
        argv += ["--slurm", str(state.path / ALLOCATION_FILE)]
        return replace(process, argv=tuple(argv), env=env, **changed)
    probe = next(health)
    argv += ["--health-port", str(probe)]
    argv += ["--drain-s", ROLLOUT_DRAIN_S] if process.kind is Kind.ROLLOUT else []
    devices = by_node(process.devices).get(node.name, ()) if process.kind is Kind.ROLLOUT else _indices(process.devices)
    if process.devices:  # the wrapper shows them; here they are names of this fleet's
        env = {name: value for name, value in env.items() if not name.endswith("_VISIBLE_DEVICES")}
    file = write_step(state.path / STEPS / process.name, env, {node.name: Share(argv, devices)})
    step = srun(allocation, f"ff-{process.name}", [node.name], file)
    own = {MARK: env[MARK]}
    return replace(process, argv=tuple(step), env=own, forks=False, probe=f"{node.address}:{probe}", **changed)


def _indices(devices: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(device) for device in devices)


def _ports(process: ProcessPlan) -> Iterator[int]:
    for address in (process.address, process.metrics):
        if address:
            yield int(address.rpartition(":")[2])


def _at(text: str, where: Mapping[int, str]) -> str:
    """Text in which each loopback address of the fleet is its node's, by TLS."""

    def moved(match: re.Match[str]) -> str:
        port = int(match["port"])
        if port not in where:
            return match[0]
        scheme = {"redis://": "rediss://", "http://": "https://"}.get(match["scheme"] or "", match["scheme"] or "")
        return f"{scheme}{match['user'] or ''}{where[port]}:{port}"

    return _LOOPBACK.sub(moved, text)
