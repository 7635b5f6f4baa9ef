"""`flowfleet up`: its flags, and the stack that they ask for."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfleet.cli import views
from flowfleet.cli.options import Json, out, tell
from flowfleet.local.stack import DEFAULT_PORT, DEFAULT_STATE_DIR, Stack
from flowfleet.models.registry import Engine
from flowfleet.process.pulse import HANG_S

if TYPE_CHECKING:
    from flowfleet.local.plan import StackOptions
    from flowfleet.local.pools import Pool

StackDir = Annotated[Path, typer.Option(help="Directory of the stack: addresses, logs, data.")]


def up(
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,…]",
            help="Rollout pool of its own replicas, model, devices=0-3 and so on; repeatable (one called default).",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Rollout processes; default: as many as --rollout-devices are for, else one, two on a CPU."),
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            help="SCORER[:key=value,…], NAME=FILE.py:FUNCTION (of picture, prompt and metadata), NAME=FILE.toml "
            "(settings of `python`), or NAME=HOST:PORT; repeatable (ocr).",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Pipeline directory that the rollouts load at start.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of --model.")] = "float32",
    engine: Annotated[Engine, typer.Option(help="Engine of the rollouts.")] = "diffusers",
    max_batch: Annotated[int | None, typer.Option(help="Maximum rows of a rollout's forward.")] = None,
    adapter_slots: Annotated[
        int | None,
        typer.Option(
            min=0, help="Adapters of jobs on one base that a rollout has ready at once; default: 16 on CPUs, else 0."
        ),
    ] = None,
    sequence_parallel_size: Annotated[
        int,
        typer.Option(min=1, help="Accelerators of a rollout, which share samples or weights (engine diffusers)."),
    ] = 1,
    data_roots: Annotated[
        list[Path] | None,
        typer.Option(
            "--data-root", help="Folder that jobs may read, besides the working folder and the recipes; repeatable."
        ),
    ] = None,
    data_urls: Annotated[
        list[str] | None,
        typer.Option("--data-url", help="SCHEME://HOST from which jobs may read data; repeatable (none)."),
    ] = None,
    data_networks: Annotated[
        list[str] | None,
        typer.Option("--data-network", help="CIDR in which those hosts may be, if not public; repeatable (none)."),
    ] = None,
    hub_models: Annotated[
        list[str] | None,
        typer.Option(
            "--hub-model",
            metavar="ORG[/NAME]",
            help="Models of the Hub that jobs may name and services download, * for all; repeatable (none).",
        ),
    ] = None,
    rollout_devices: Annotated[
        str,
        typer.Option(help='Accelerators such as 0,1, --sequence-parallel-size per rollout; "auto": the first ones.'),
    ] = "auto",
    trainer_devices: Annotated[
        str, typer.Option(help='Accelerators of trainers, one per rank; "auto": those that rollouts leave.')
    ] = "auto",
    trainer_python: Annotated[
        Path | None, typer.Option(help="Python of trainers, such as one with VeOmni (this one).")
    ] = None,
    trainers: Annotated[
        int, typer.Option(min=1, help="Ranks of trainers at once without accelerators: so many jobs run side by side.")
    ] = 2,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Limit on what is kept of ended jobs, such as jobs=200; repeatable."),
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Limit on what jobs may request, such as samples_per_step=512; repeatable.",
        ),
    ] = None,
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="Store that ended jobs are copied to before removal (fsspec).")
    ] = None,
    start_timeout_s: Annotated[
        float, typer.Option("--start-timeout", help="Seconds within which every process must serve.")
    ] = 900.0,
    hang_s: Annotated[
        float, typer.Option("--hang", help="Seconds within which a hanging process is restarted.")
    ] = HANG_S,
    port: Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")] = DEFAULT_PORT,
    state_dir: StackDir = DEFAULT_STATE_DIR,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Let every user of this machine read and steer jobs, without an API key.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it runs; stop it with `flowfleet down`.")
    ] = False,
    json_: Json = False,
) -> None:
    """Start a stack on this machine, or on the nodes of a Slurm allocation: Redis, controller, rollouts, rewards."""
    given = {name: value for name, value in locals().items() if value is not None}
    _run(_options(given), detach, json_)


def _options(given: dict[str, Any]) -> StackOptions:
    """The stack's options from the command's, which have the same names."""
    from flowfleet.local.plan import StackOptions

    trainers_on = None if given["trainer_devices"] == "auto" else given["trainer_devices"].split(",")
    known = {name: value for name, value in given.items() if name in StackOptions.model_fields}
    return StackOptions(**{**known, "trainer_devices": trainers_on, "pools": _pools(given), "key": not given["no_key"]})


def _pools(given: dict[str, Any]) -> list[Pool]:
    """Pools by --pool, each with what the other options say of rollouts unless it says otherwise; else one."""
    from flowfleet.local.plan import usual_replicas
    from flowfleet.local.pools import DEFAULT, Pool, model_at, parse_devices, parse_pool

    usual = {name: given[name] for name in given.keys() & Pool.model_fields.keys()}
    if "model" in usual:
        usual["model"] = model_at(usual["model"])
    if given["rollout_devices"] != "auto":
        usual["devices"] = parse_devices(given["rollout_devices"])
    elif "pool" not in given:
        usual.setdefault("replicas", usual_replicas(usual["engine"]))
    return [] if usual.get("replicas") == 0 else [parse_pool(text, usual) for text in given.get("pool", [DEFAULT])]


def _run(options: StackOptions, detach: bool, as_json: bool) -> None:
    """Starts the stack and tells about it; unless detached it ends with this process."""
    from flowfleet.local.session import run_stack, start_detached, stop_on_signals
    from flowfleet.slurm.allocation import is_inside
    from flowfleet.slurm.head import run_in_allocation

    if is_inside(os.environ):
        if detach:
            raise ValueError("inside a Slurm allocation the fleet ends with this command: leave out --detach")
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        run_in_allocation(options, lambda stack: _tell_stack(stack, as_json))
        return
    if detach:
        _tell_stack(start_detached(options), as_json)
        return
    stop = threading.Event()
    stop_on_signals(stop)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_stack(options, stop, lambda stack: _tell_stack(stack, as_json, "   Ctrl-C stops the stack."))


def _tell_stack(stack: Stack, as_json: bool, hint: str = "") -> None:
    def show() -> None:
        views.show_stack(stack, out)
        out.print(f"\nREST API: {stack.url}\nPage:     {stack.page}{hint}", highlight=False, soft_wrap=True)

    tell(stack.model_dump(exclude={"redis_url", "api_key"}), as_json, show)  # which hold secrets
