"""`flowfleet slurm`: a fleet as a job of Slurm (docs/slurm.md)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowfleet.cli.options import Json, out, tell

DEFAULT_DIR = Path("runs/slurm")
StateDir = Annotated[Path, typer.Option(help="Folder of the fleet, on a file system that all nodes share.")]

app = typer.Typer(no_args_is_help=True, help="Run a fleet as a job of Slurm.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="Accelerators of each node; 0: train on CPUs.")] = 0,
    rollouts: Annotated[int | None, typer.Option(min=0, help="Rollouts; trainers get the other accelerators.")] = None,
    rewards: Annotated[
        list[str] | None, typer.Option("--reward", help="As `flowfleet up --reward`; repeatable.")
    ] = None,
    up_: Annotated[str, typer.Option("--up", metavar="WORDS", help="More options of `flowfleet up`.")] = "",
    partition: Annotated[str, typer.Option(help="Of sbatch.")] = "",
    account: Annotated[str, typer.Option(help="Of sbatch.")] = "",
    qos: Annotated[str, typer.Option(help="Of sbatch.")] = "",
    time: Annotated[str, typer.Option(help="Of sbatch; the fleet is queued again at its end.")] = "",
    constraint: Annotated[str, typer.Option(help="Of sbatch.")] = "",
    lead_s: Annotated[
        float, typer.Option("--lead", min=1.0, help="Seconds before the time limit at which the fleet saves.")
    ] = 300.0,
    python: Annotated[Path, typer.Option(help="Python of the environment on the nodes.")] = Path(sys.executable),
    container: Annotated[str, typer.Option(help="Apptainer image for rollouts, rewards and trainers.")] = "",
    container_image: Annotated[str, typer.Option(help="The same for pyxis and enroot.")] = "",
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until the fleet serves.")] = 0.0,
    state_dir: StateDir = DEFAULT_DIR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
    json_: Json = False,
) -> None:
    """Submit a fleet. Options after -- go to sbatch."""
    from flowfleet.slurm.commands import await_serving, submit
    from flowfleet.slurm.script import SlurmOptions, render

    words = ["--replicas", str(rollouts)] if rollouts is not None else []
    words += [word for reward in rewards or () for word in ("--reward", reward)]
    options = SlurmOptions(
        state_dir=state_dir.expanduser().absolute(),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        constraint=constraint,
        lead_s=lead_s,
        python=python.absolute(),
        container=container,
        container_image=container_image,
        up=(*words, *shlex.split(up_)),
        sbatch=tuple(context.args),
    )
    if dry_run:
        typer.echo(render(options), nl=False)
        return
    job_id = submit(options)
    hint = f"job {job_id}; when it serves: `. {options.state_dir}/client.env`, then `flowfleet submit`"
    tell({"job_id": job_id}, json_, lambda: out.print(hint, highlight=False, soft_wrap=True))
    if wait_s:
        await_serving(options.state_dir, wait_s)


@app.command()
def down(state_dir: StateDir = DEFAULT_DIR, json_: Json = False) -> None:
    """End the fleet; trainers save first."""
    from flowfleet.slurm.commands import end_fleet

    ended = end_fleet(state_dir.absolute())
    tell({"ended": ended}, json_, lambda: out.print("ended" if ended else "it has ended already", highlight=False))


@app.command()
def status(state_dir: StateDir = DEFAULT_DIR, json_: Json = False) -> None:
    """Show the fleet's job, and how to reach the controller."""
    from flowfleet.slurm.commands import require_fleet

    fleet = require_fleet(state_dir.absolute())
    said = f"job {fleet.job_id}: {fleet.state or 'ended'}" + (f" on {fleet.nodes}" if fleet.nodes else "")
    said += f" ({fleet.reason})" if fleet.state == "PENDING" else ""
    said += f"; it serves: `. {state_dir.absolute()}/client.env`" if fleet.serves else ""
    tell(asdict(fleet), json_, lambda: out.print(said, highlight=False, soft_wrap=True))


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="slurm, controller, rollout-0 and so on.")] = "slurm",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines of its end.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    state_dir: StateDir = DEFAULT_DIR,
    json_: Json = False,
) -> None:
    """Print the end of a log."""
    from flowfleet.slurm.commands import log_of

    file = log_of(state_dir.absolute(), name)
    if follow:
        subprocess.run(["tail", f"--lines={lines}", "--follow", str(file)], check=False)
        return
    found = file.read_text(errors="replace").splitlines()[-lines:]
    tell(found, json_, lambda: out.print("\n".join(found), highlight=False, markup=False, soft_wrap=True))
