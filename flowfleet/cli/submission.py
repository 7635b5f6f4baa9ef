"""`flowfleet submit --dry-run` shows the resolved job and each process that a local stack would start for it; `--check`
reads its data from this machine, as the controller will when the job runs."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowfleet.cli.views import as_yaml
from flowfleet.hardware.accelerators import show_only
from flowfleet.job.spec import JobSpec
from flowfleet.local.plan import StackOptions, make_plan, ports_needed
from flowfleet.local.pools import Pool
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.session import place_stack
from flowfleet.process.commands import TRAINER, forkserver_command, trainer_flags
from flowfleet.prompts.stores import read_prompts
from flowfleet.scorers import without_settings


@dataclass(frozen=True)
class Process:
    name: str
    argv: Sequence[str]
    environment: Sequence[str]
    """Names of variables that it gets besides the inherited ones."""


@dataclass(frozen=True)
class Explained:
    job: dict[str, Any]
    """Settings of the job, defaults filled in."""
    warnings: Sequence[str]
    processes: Sequence[Process]
    placement_warning: str | None


def explain(spec: JobSpec) -> Explained:
    """Resolves the job, and each process that a local stack would start for it."""
    rewards = tuple(name if name in without_settings() else f"{name}=HOST:0" for name in spec.reward_services)
    pool = Pool(name=spec.rollout.pool, model=spec.model.path, dtype=spec.model.dtype)
    options = StackOptions(port=0, rewards=rewards, pools=(pool,))
    placement = place_stack(options)
    redis = ["redis-server", "<state-dir>/redis/redis.conf"]
    plan = make_plan(options, [0] * ports_needed(options), redis, StackSecrets(), placement)
    processes = [Process(one.name, one.argv, tuple(one.env)) for one in plan.processes]
    forkserver = forkserver_command(sys.executable, TRAINER)
    processes.append(Process("trainers (a process of the controller's, which has imported all)", forkserver, ()))
    trainer = ["services.trainer", *trainer_flags(Path("runs/local/trainers/<job>.port"))]
    name = f"trainer (forked from trainers for the job, {spec.trainer.world_size} ranks)"
    processes.append(Process(name, trainer, ("OMP_NUM_THREADS", *show_only(placement.trainer))))
    return Explained(spec.model_dump(mode="json"), spec.warnings, processes, placement.warning)


def show(explained: Explained, console: Console) -> None:
    """Prints the job as YAML, and a paragraph for each process."""
    _print(console, "# The job, defaults filled in\n" + as_yaml(explained.job))
    for warning in explained.warnings:
        _print(console, f"\nwarning: {warning}")
    _print(console, "\n# `flowfleet plan` predicts what it needs")
    _print(console, "# Its processes on a local stack; port 0: a free one, chosen at start")
    for process in explained.processes:
        environment = ", ".join(process.environment) or "inherited"
        _print(console, f"\n{process.name}:\n  {shlex.join(process.argv)}\n  environment: {environment}")
    if explained.placement_warning:
        _print(console, f"\nwarning: {explained.placement_warning}")


def _print(console: Console, text: str) -> None:
    """Prints the text unchanged: command lines and settings are not markup and must not wrap."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


_SHOWN = 100


def check_data(spec: JobSpec) -> list[dict[str, Any]]:
    """Number, first prompt and metadata of each data set. Raises ValueError with all that is wrong."""
    problems, files = [], []
    for setting, source, columns in spec.data_files:
        try:
            prompts = read_prompts(source, columns)
        except ValueError as error:
            problems.append(f"{setting}: {error}")
            continue
        first = prompts[0]
        about = {"first": first.text, "metadata": list(first.metadata)}
        files.append({"data": setting.removeprefix("data."), "prompts": len(prompts), **about})
    if problems:
        raise ValueError("\n".join(problems))
    return files


def num_held_out(spec: JobSpec) -> int:
    """Held-out prompts of a job whose files are here; 0 where one cannot be read."""
    try:
        held_out = [(source.validation, source.columns) for source in spec.data.held_out]
        return sum(len(read_prompts(place, columns)) for place, columns in held_out if place)
    except ValueError:
        return 0


def show_data(files: Iterable[dict[str, Any]], out: Console) -> None:
    """Prints a line or two of each data set."""
    for file in files:
        first = repr(file["first"][:_SHOWN])
        out.print(f"data.{file['data']}: {file['prompts']} prompts, first {first}", highlight=False)
        if file["metadata"]:
            out.print(f"  metadata: {', '.join(file['metadata'])}", highlight=False)
