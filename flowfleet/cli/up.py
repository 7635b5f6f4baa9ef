"""`flowfleet up`: its flags, and the stack that they ask for."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowfleet import hub
from flowfleet.cli import views
from flowfleet.cli.options import Json, out, tell
from flowfleet.job.files import shipped
from flowfleet.local.stack import DEFAULT_PORT, DEFAULT_STATE_DIR, Stack
from flowfleet.models.registry import Engine
from flowfleet.process.pulse import HANG_S

if TYPE_CHECKING:
    from flowfleet.local.plan import StackOptions

StackDir = Annotated[Path, typer.Option(help="Directory of the stack: addresses, logs, data.")]


def up(
    replicas: Annotated[
        int | None,
        typer.Option(help="Rollout processes; default: as many as --rollout-devices are for, else one, two on a CPU."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="SCORER[:key=value,…], NAME=FILE.py:FUNCTION (of picture, prompt and metadata), NAME=FILE.toml "
            "(settings of `python`), or NAME=HOST:PORT; repeatable (ocr)."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Pipeline directory that the rollouts load at start.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of --model.")] = "float32",
    engine: Annotated[Engine, typer.Option(help="Engine of the rollouts.")] = "diffusers",
    max_batch: Annotated[int | None, typer.Option(help="Maximum rows of a rollout's forward.")] = None,
    sequence_parallel_size: Annotated[
        int, typer.Option(min=1, help="Accelerators that share every sample of a rollout (Wan, engine diffusers).")
    ] = 1,
    data_root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that jobs may read, besides the working folder and the recipes; repeatable."),
    ] = None,
    data_url: Annotated[
        list[str] | None, typer.Option(help="SCHEME://HOST from which jobs may read data; repeatable (none).")
    ] = None,
    data_network: Annotated[
        list[str] | None, typer.Option(help="CIDR in which those hosts may be, if not public; repeatable (none).")
    ] = None,
    hub_model: Annotated[
        list[str] | None,
        typer.Option(
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
    trainers: Annotated[
        int, typer.Option(min=1, help="Ranks of trainers at once without accelerators: so many jobs run side by side.")
    ] = 2,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Limit on what is kept of ended jobs, such as jobs=200; repeatable."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Limit on what jobs may request, such as samples_per_step=512; repeatable."
        ),
    ] = None,
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="Store that ended jobs are copied to before removal (fsspec).")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds within which every process must serve.")] = 900.0,
    hang: Annotated[float, typer.Option(help="Seconds within which a hanging process is restarted.")] = HANG_S,
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
    """Start a stack on this machine: Redis, controller, rollouts, rewards."""
    from flowfleet.local.plan import StackOptions

    rollouts_on = _devices(rollout_devices)
    options = StackOptions(
        state_dir=state_dir,
        port=port,
        data_roots=tuple(data_root or ()),
        data_urls=tuple(data_url or ()),
        data_networks=tuple(data_network or ()),
        hub_models=tuple(hub_model or ()),
        replicas=_replicas(replicas, rollouts_on, sequence_parallel_size, engine),
        rewards=tuple(reward or ("ocr",)),
        model=None if model is None else _model(model),
        dtype=dtype,
        engine=engine,
        max_batch=max_batch,
        sequence_parallel_size=sequence_parallel_size,
        rollout_devices=rollouts_on,
        trainer_devices=_devices(trainer_devices),
        trainers=trainers,
        keep=tuple(keep or ()),
        limits=tuple(limit or ()),
        archive=archive,
        start_timeout_s=start_timeout,
        hang_s=hang,
        key=not no_key,
    )
    _run(options, detach, json_)


def _replicas(asked: int | None, devices: tuple[str, ...] | None, each: int, engine: str) -> int:
    from flowfleet.local.plan import usual_replicas

    if asked is not None:
        return asked
    return max(1, len(devices) // each) if devices else usual_replicas(engine)


def _run(options: StackOptions, detach: bool, as_json: bool) -> None:
    """Starts the stack and tells about it; unless detached it ends with this process."""
    from flowfleet.local.session import run_stack, start_detached, stop_on_signals

    if detach:
        _tell_stack(start_detached(options), as_json)
        return
    stop = threading.Event()
    stop_on_signals(stop)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_stack(options, stop, lambda stack: _tell_stack(stack, as_json, "   Ctrl-C stops the stack."))


def _model(written: str) -> str:
    """The model that rollouts load at start: a folder here, one that comes with the package, or a name of the Hub."""
    if Path(written).is_dir() or (hub.name_of(written) is not None and shipped(written) is None):
        return written
    if (found := shipped(written)) is None:
        raise ValueError(
            f"--model {written}: there is no such folder; give a diffusers pipeline's, or ORG/NAME of the Hub"
        )
    return str(found)


def _devices(text: str) -> tuple[str, ...] | None:
    return None if text == "auto" else tuple(name.strip() for name in text.split(","))


def _tell_stack(stack: Stack, as_json: bool, hint: str = "") -> None:
    def show() -> None:
        views.show_stack(stack, out)
        out.print(f"\nREST API: {stack.url}\nPage:     {stack.page}{hint}", highlight=False, soft_wrap=True)

    tell(stack.model_dump(exclude={"redis_url", "api_key"}), as_json, show)  # which hold secrets
