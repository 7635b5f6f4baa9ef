"""What `flowfleet submit --dry-run` prints: the resolved job, and each process a local stack would start for it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from flowfleet.cli.views import as_yaml
from flowfleet.hardware.accelerators import show_only
from flowfleet.job.spec import JobSpec
from flowfleet.local.placement import Placement
from flowfleet.local.plan import Plan, StackOptions, make_plan, ports_needed
from flowfleet.local.rewards import WITHOUT_SETTINGS
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.session import place_stack
from flowfleet.process.commands import forkserver_command, trainer_flags


def explain(spec: JobSpec, console: Console) -> None:
    """The resolved job, and each process that a local stack would start for it."""
    _print(console, "# The job, defaults filled in\n" + as_yaml(spec.model_dump(mode="json")))
    for warning in spec.warnings:
        _print(console, f"\nwarning: {warning}")
    _show_needs(spec, console)
    _print(console, "\n# Its processes on a local stack; port 0: a free one, chosen at start")
    rewards = tuple(name if name in WITHOUT_SETTINGS else f"{name}=HOST:0" for name in spec.reward_services)
    options = StackOptions(port=0, rewards=rewards, model=spec.model.path, dtype=spec.model.dtype)
    placement = place_stack(options)
    for process in _plan(options, placement).processes:
        _show_process(process.name, process.argv, process.env, console)
    forkserver = forkserver_command(sys.executable)
    port_file = Path("runs/local/trainers/<job>.port")
    _show_process("trainers (a process of the controller's, which has imported all)", forkserver, (), console)
    trainer = ["services.trainer", *trainer_flags(port_file)]
    env = ("OMP_NUM_THREADS", *show_only(placement.trainer))
    ranks = spec.trainer.world_size
    _show_process(f"trainer (forked from trainers for the job, {ranks} ranks)", trainer, env, console)
    if placement.warning:
        _print(console, f"\nwarning: {placement.warning}")


def _show_needs(spec: JobSpec, console: Console) -> None:
    """What the job needs, where the model's configurations and the trainer's packages are."""
    if not (Path(spec.model.path) / "model_index.json").is_file():
        return
    with contextlib.suppress(ImportError, ValueError):
        from flowfleet.planning.plan import predict
        from flowfleet.planning.report import headline

        _print(console, f"\n# What it needs; `flowfleet plan` tells more\n{headline(predict(spec, is_rough=True))}")


def _plan(options: StackOptions, placement: Placement) -> Plan:
    redis = ["redis-server", "<state-dir>/redis/redis.conf"]
    return make_plan(options, [0] * ports_needed(options), redis, StackSecrets(), placement)


def _show_process(name: str, argv: Sequence[str], env: Iterable[str], console: Console) -> None:
    _print(console, f"\n{name}:\n  {shlex.join(argv)}\n  environment: {', '.join(env) or 'inherited'}")


def _print(console: Console, text: str) -> None:
    """Prints the text unchanged: command lines and settings are not markup and must not wrap."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
