"""The Slurm allocation that this process runs in: its nodes, how they are reached, and what they have."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from flowfleet.local.files import read_own, write_atomically
from flowfleet.local.ports import FIRST_PORT, LAST_PORT
from flowfleet.local.stack import StackError
from flowfleet.slurm.tools import node_facts, slurm

ALLOCATION_FILE: Final = "allocation.json"
LEAD: Final = "FLOWFLEET_SLURM_LEAD_S"
"""Variable: seconds before the time limit at which Slurm signals the fleet to save and requeue."""
CONTAINER: Final = "FLOWFLEET_SLURM_CONTAINER"
"""Variable: words before Python's in a step, such as `apptainer exec --nv IMAGE`."""
SRUN: Final = "FLOWFLEET_SLURM_SRUN"
"""Variable: more options of each `srun`."""
LEAD_S: Final = 300.0
MARGIN_S: Final = 30.0
"""Part of the lead for Redis's copy and the requeue."""
CLOCKS_S: Final = 60.0
"""Largest difference between two nodes' clocks that is accepted."""
PROBE_S: Final = 120.0
_WHOLE: Final = 0xFFFF_FFF0
"""Ids of steps from here on are Slurm's own: batch, extern, interactive."""


class Node(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    address: str
    """At which the other nodes reach it."""
    gpus: int
    """Accelerators that the job has there."""
    cpus: int


class Allocation(BaseModel):
    """The nodes of one run of a Slurm job, the first one being where Redis and the controller are."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    restarts: int = 0
    nodes: tuple[Node, ...]
    trainer_devices: tuple[str, ...] = ()
    """NODE:INDEX of each accelerator of trainers, or of each place where there are none."""
    drain_s: float = LEAD_S - MARGIN_S
    """Longest time in which trainers may save when the fleet ends."""
    container: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Tells this run of the job from an earlier one, whose processes are gone."""
        return f"{self.job_id}.{self.restarts}"

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def write(self, state_dir: Path) -> Path:
        write_atomically(state_dir / ALLOCATION_FILE, self.model_dump_json())
        return state_dir / ALLOCATION_FILE


def read_allocation(file: Path) -> Allocation:
    """Raises ValueError."""
    try:
        return Allocation.model_validate_json(read_own(file))
    except (OSError, ValidationError) as error:
        raise ValueError(f"--slurm {file} is not an allocation that `flowfleet up` wrote: {error}") from None


def is_inside(env: Mapping[str, str]) -> bool:
    """True in a batch script or a shell of `salloc`; false in a step, which has only its own share of the job."""
    step = env.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) < _WHOLE
    return "SLURM_JOB_NODELIST" in env and not in_step and shutil.which("srun") is not None


def find_allocation(
    state_dir: Path, num_ports: int, env: Mapping[str, str] = os.environ
) -> tuple[Allocation, list[int]]:
    """Asks every node of the job about itself. Returns the allocation and ports that are free on all nodes. Raises
    StackError for nodes on which the fleet cannot run."""
    names = slurm("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    if env.get("SLURMD_NODENAME") in names:  # this one is where Redis and the controller are
        names.sort(key=lambda name: name != env["SLURMD_NODENAME"])
    facts = node_facts(names)
    told = {name: facts.get(name, {}).get("NodeAddr", name) for name in names}
    container = tuple(shlex.split(env.get(CONTAINER, "")))
    extra = tuple(shlex.split(env.get(SRUN, "")))
    answers = _probe(state_dir, names, [*told.values()], num_ports, (*container,), extra)
    nodes = [
        Node(
            name=name,
            address=_address(name, told[name], answers),
            gpus=int(answers[name]["gpus"]),
            cpus=int(answers[name]["cpus"]),
        )
        for name in names
    ]
    free = set.intersection(*(set(answer["ports"]) for answer in answers.values()))
    if len(free) < num_ports:
        raise StackError(
            f"no {num_ports} ports between {FIRST_PORT} and {LAST_PORT} are free on all of {', '.join(names)}"
        )
    lead_s = float(env.get(LEAD) or LEAD_S)
    allocation = Allocation(
        job_id=env["SLURM_JOB_ID"],
        restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
        nodes=tuple(nodes),
        drain_s=max(10.0, lead_s - MARGIN_S),
        container=container,
        srun=extra,
    )
    return allocation, sorted(free)[:num_ports]


def _probe(
    state_dir: Path,
    names: Sequence[str],
    hosts: Sequence[str],
    num_ports: int,
    before: tuple[str, ...],
    srun: tuple[str, ...],
) -> dict[str, dict[str, Any]]:
    """Node → its answer. A step on each node reads a word from the shared folder."""
    word, file = secrets.token_hex(8), state_dir / "probe"
    write_atomically(file, word)
    count = str(len(names))
    argv = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mem=0"]
    argv += [*srun, *before, sys.executable, "-m", "flowfleet.slurm.probe", str(file), str(num_ports), *hosts]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise StackError(f"the nodes {', '.join(names)} did not start a step within {PROBE_S:.0f} s") from None
    finally:
        file.unlink(missing_ok=True)
    if done.returncode:
        raise StackError(f"a first step on {', '.join(names)} failed: {done.stderr.strip()[-1000:]}")
    answers = {answer["node"]: answer for answer in map(json.loads, filter(None, done.stdout.splitlines()))}
    now = time.time()
    for name in names:
        if name not in answers:
            raise StackError(f"node {name} did not answer in a first step: {done.stderr.strip()[-1000:]}")
        if answers[name]["word"] != word:
            raise StackError(f"{state_dir} is not the same folder on {name}: give a --state-dir that all nodes share")
        if abs(apart := answers[name]["time"] - now) > CLOCKS_S + PROBE_S * (apart < 0):
            raise StackError(f"the clock of {name} is {apart:+.0f} s from this node's: have the clocks set (NTP)")
    return answers


def _address(name: str, told: str, answers: Mapping[str, Mapping[str, Any]]) -> str:
    """An IP address by which others reach a node. Its own /etc/hosts may give it a loopback address, so another node's
    answer counts first."""
    try:
        return str(ipaddress.ip_address(told))
    except ValueError:
        pass
    others = [answer for node, answer in answers.items() if node != name]
    for answer in (*others, answers[name]):
        if told in answer["addresses"]:
            return str(answer["addresses"][told])
    raise StackError(
        f"no node knows the address of {name} ({told}): see to the cluster's DNS on {socket.gethostname()}"
    )
