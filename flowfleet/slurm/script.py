"""The sbatch script of a fleet. Pure: options in, text out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flowfleet.slurm.allocation import CONTAINER, LEAD, LEAD_S, SRUN


class SlurmOptions(BaseModel):
    """Options of `flowfleet slurm up`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=0, ge=0)
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    constraint: str = ""
    lead_s: float = Field(default=LEAD_S, ge=1.0)
    """Seconds before the time limit at which the fleet saves and is queued again."""
    python: Path = Path(sys.executable)
    container: str = ""
    """Apptainer image that steps run in."""
    container_image: str = ""
    """Image of pyxis and enroot that steps run in."""
    up: tuple[str, ...] = ()
    """More words of `flowfleet up`."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch."""

    @model_validator(mode="after")
    def _one_container(self) -> SlurmOptions:
        if self.container and self.container_image:
            raise ValueError("--container is Apptainer's and --container-image is pyxis's: give one of them")
        if wrong := [option for option in self.sbatch if not option.startswith("-")]:
            raise ValueError(f"after -- come options of sbatch as --name=value, not {wrong[0]!r}")
        return self


def render(options: SlurmOptions) -> str:
    """The script. Its shell becomes `flowfleet up`, which so gets the signals of Slurm."""
    lines = ["#!/bin/bash", "# A fleet of Flowfleet, written by `flowfleet slurm up`."]
    lines += [f"#SBATCH {option}" for option in _directives(options)]
    settings = {LEAD: f"{options.lead_s:g}", CONTAINER: "", SRUN: "", "PYTHONSAFEPATH": "1"}
    if options.container:
        settings[CONTAINER] = shlex.join(["apptainer", "exec", "--nv", options.container])
    if options.container_image:
        mounts = f"--container-mounts={options.state_dir}:{options.state_dir},{Path.cwd()}:{Path.cwd()}"
        settings[SRUN] = shlex.join([f"--container-image={options.container_image}", mounts])
    lines += [f"export {name}={shlex.quote(value)}" for name, value in settings.items() if value]
    command = [str(options.python), "-m", "flowfleet.cli", "up", "--state-dir", str(options.state_dir), "--port", "0"]
    return "\n".join([*lines, f"exec {shlex.join([*command, *options.up])}", ""])


def _directives(options: SlurmOptions) -> Iterator[str]:
    yield "--job-name=flowfleet"
    yield f"--nodes={options.nodes}"
    yield "--ntasks-per-node=1"
    if options.gpus_per_node:
        yield f"--gpus-per-node={options.gpus_per_node}"
    for name in ("partition", "account", "qos", "time", "constraint"):
        if value := getattr(options, name):
            yield f"--{name}={value}"
    if not any(option.startswith(("--cpus-per-task", "-c", "--exclusive")) for option in options.sbatch):
        yield "--exclusive"  # else a node's share is one CPU
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{options.lead_s:.0f}"
    yield f"--output={options.state_dir / 'logs' / 'slurm.log'}"
    yield from options.sbatch
