"""`flowfleet pools`: rollout pools of the running stack (docs/several-jobs.md)."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer

from flowfleet.api.jobs import JobStatus
from flowfleet.cli import views
from flowfleet.cli.options import Ca, Json, Url, out, tell
from flowfleet.cli.up import StackDir
from flowfleet.client import Client
from flowfleet.local.stack import DEFAULT_STATE_DIR, StackError, StateDir

ADD_S = 900.0

app = typer.Typer(no_args_is_help=True, help="List, add and remove rollout pools of a running stack.")


@app.command("list")
def list_(url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """List pools with their replicas and the jobs that use them."""
    with Client(url, ca=ca) as client:
        fleet, jobs = client.fleet(), _jobs(client)
    replicas = Counter(replica.pool for replica in fleet.replicas)
    names = sorted({*replicas, *(fleet.pools or ()), *jobs})
    made = views.table("POOL", "REPLICAS", "JOBS")
    for name in names:
        made.add_row(name, str(replicas[name]), ", ".join(jobs[name]))
    found = {name: {"replicas": replicas[name], "jobs": jobs[name]} for name in names}
    tell(found, json_, lambda: out.print(made))


@app.command()
def add(
    pool: Annotated[str, typer.Argument(metavar="NAME[:KEY=VALUE,…]", help="As `flowfleet up --pool` takes it.")],
    state_dir: StackDir = DEFAULT_STATE_DIR,
    json_: Json = False,
) -> None:
    """Start a pool in this machine's stack. It starts again with the stack, until it is removed."""
    from flowfleet.local.pool_changes import add_pool
    from flowfleet.local.pools import parse_pool

    asked = parse_pool(pool)
    if asked.model is not None and Path(asked.model).is_dir():  # rollouts run in the stack's working folder
        asked = asked.model_copy(update={"model": str(Path(asked.model).resolve())})
    processes = add_pool(StateDir(state_dir), asked, ADD_S)
    tell(processes, json_, lambda: out.print(f"pool {asked.name}: {', '.join(processes)}", highlight=False))


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a pool that no job uses.")],
    state_dir: StackDir = DEFAULT_STATE_DIR,
    json_: Json = False,
) -> None:
    """End a pool of this machine's stack, and give its accelerators back."""
    from flowfleet.local.pool_changes import remove_pool

    state = StateDir(state_dir)
    if (stack := state.read()) is not None:
        with Client(stack.url) as client:
            if users := _jobs(client)[name]:
                raise StackError(f"pool {name} has jobs: wait for, finish or cancel {', '.join(users)}")
    remove_pool(state, name)
    tell({"removed": name}, json_, lambda: out.print(f"pool {name} ended", highlight=False))


def _jobs(client: Client) -> defaultdict[str, list[str]]:
    """Jobs that have not ended, by pool."""
    found = defaultdict[str, list[str]](list)
    for status in JobStatus:
        for job in () if status.terminal else client.rows(status):
            found[job.pool].append(job.id)
    return found
