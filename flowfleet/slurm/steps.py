"""A process of the fleet as a step: the file that its wrapper reads, and the `srun` that starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowfleet.local.files import write_atomically
from flowfleet.slurm.allocation import Allocation

STEPS = "steps"
"""Folder of the state directory, with a folder a step."""


@dataclass(frozen=True)
class Share:
    """A step's share of one node."""

    argv: Sequence[str]
    devices: Sequence[int] = ()
    """Places among the accelerators that the job has there."""


def by_node(devices: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Node → indices of its accelerators, from names as NODE:INDEX, in their order."""
    found: dict[str, tuple[int, ...]] = {}
    for device in devices:
        node, _, index = device.rpartition(":")
        found[node] = (*found.get(node, ()), int(index))
    return found


def write_step(folder: Path, env: Mapping[str, str], nodes: Mapping[str, Share]) -> Path:
    """Writes the wrapper's file. The folder is of this step alone."""
    shares = {node: {"argv": [*share.argv], "devices": [*share.devices]} for node, share in nodes.items()}
    write_atomically(folder / "step.json", json.dumps({"env": dict(env), "nodes": shares}))
    return folder / "step.json"


def srun(allocation: Allocation, name: str, nodes: Sequence[str], file: Path) -> list[str]:
    """Command that runs a step. It sees all accelerators of its nodes, shared with other steps (`--overlap`): the
    wrapper shows each process its own."""
    gpus = max(allocation.node(node).gpus for node in nodes)
    argv = ["srun", "--overlap", f"--job-name={name}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
    argv += [
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--mem=0",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    argv += [f"--gpus-per-node={gpus}"] if gpus else []
    return [*argv, *allocation.srun, *allocation.container, sys.executable, "-m", "flowfleet.slurm.step", str(file)]
