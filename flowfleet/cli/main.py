"""The `flowfleet` command, a thin face: jobs by `flowfleet.client`, the stack of this machine by `flowfleet.local`."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import httpx
import typer

from flowfleet.api.jobs import Job
from flowfleet.api.problems import ApiError
from flowfleet.cli import attach, evaluation, models, pools, profiling, slurm, sweep, views
from flowfleet.cli import votes as cli_votes
from flowfleet.cli.doctor.command import doctor
from flowfleet.cli.errors import Group
from flowfleet.cli.options import Ca, JobId, Json, Url, err, out, tell, tell_line
from flowfleet.cli.redis import redis_acl
from flowfleet.cli.rewards import command as cli_rewards
from flowfleet.cli.rewards.check import check_reward
from flowfleet.cli.samples.command import samples
from flowfleet.cli.settings import show_settings
from flowfleet.cli.track import track
from flowfleet.cli.trying.command import try_reward
from flowfleet.cli.up import StackDir, up
from flowfleet.client import Client
from flowfleet.client.continuing import continued
from flowfleet.client.progress import follow
from flowfleet.hardware.cards import card_named
from flowfleet.job.files import COMPOSITION_LEFT, find_job_file, prepare_job
from flowfleet.local.stack import DEFAULT_STATE_DIR, StateDir
from flowfleet.models.registry import family_of
from flowfleet.process.proxies import direct_to_loopback

app = typer.Typer(
    cls=Group,
    help="Reinforcement learning for flow-matching image models, as a fleet of services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"flowfleet {version('flowfleet')}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    os.environ.update(direct_to_loopback(os.environ))


app.add_typer(cli_rewards.app, name="rewards")
app.add_typer(cli_votes.app, name="votes")
app.add_typer(sweep.app, name="sweep")
app.add_typer(pools.app, name="pools")
app.add_typer(slurm.app, name="slurm")


# -- the local stack -------------------------------------------------------------------------------------------------


app.command()(up)


@app.command()
def down(state_dir: StackDir = DEFAULT_STATE_DIR, json_: Json = False) -> None:
    """Stop this machine's stack and its trainers."""
    from flowfleet.local.session import stop_stack

    state = StateDir(state_dir)
    stopped = stop_stack(state)
    said = "stopped" if stopped else f"no stack runs in {state.path}"
    tell({"stopped": stopped}, json_, lambda: out.print(said, highlight=False))


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help="signs: a tiny model learns to write its words.")] = "signs",
    seed: Annotated[int | None, typer.Option(help="Seed of the job; default: the recipe's.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Job file, or name of a recipe; default: the demo's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value of the job; repeatable.")] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Folder for results and the stack's files; its contents are replaced.")
    ] = Path("runs/demo"),
    json_: Json = False,
) -> None:
    """Train a small model from start to end, and leave figures, pictures and the model."""
    from flowfleet.demo.run import run_demo

    if name == "composition":
        raise ValueError(f"the demo composition has left Flowfleet: {COMPOSITION_LEFT}")
    if name != "signs":
        raise ValueError(f"no demo is called {name!r}: the demo is signs; --recipe shows another job")
    changes = [*(set_ or ()), *([] if seed is None else [f"seed={seed}"])]
    summary = run_demo(recipe or Path("tiny_ocr"), state_dir, changes, err if json_ else out)
    if json_:
        tell_line(summary)


# -- jobs ------------------------------------------------------------------------------------------------------------


def _steering(act: Callable[[Client, str], Job], text: str) -> None:
    """Adds a command that asks something of one job, named as the client's method."""

    def command(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
        with Client(url, ca=ca) as client:
            views.say(act(client, client.find(job_id).id), json_)

    app.command(act.__name__, help=text)(command)


@app.command()
def submit(
    file: Annotated[
        Path | None, typer.Argument(help="Job file (TOML, YAML or JSON), or name of a recipe; optional with --from.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="ID[@STEP]", help="Start from a job's model; without FILE, resume that job."),
    ] = None,
    follow_: Annotated[bool, typer.Option("--follow", help="Watch the job until it ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the resolved job and its processes.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read the job's data from this machine and submit nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, e.g. schedule.steps=20; repeatable.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting again with the same key returns the same job.")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Submit a job, also one that continues another."""
    if check or dry_run:  # of this machine, like `plan`: it asks no controller
        if file is None or from_ is not None:
            raise ValueError("--check and --dry-run ask no controller: give a job file, and leave --from out")
        spec = prepare_job(file, set_ or (), same_machine=True)
        if check:
            from flowfleet.cli.submission import check_data, show_data

            found = check_data(spec)
            tell(found, json_, lambda: show_data(found, out))
        else:
            from flowfleet.cli.submission import explain, show

            explained = explain(spec)
            tell(explained, json_, lambda: show(explained, out))
        return
    with Client(url, ca=ca) as client:
        if from_ is not None:
            spec = continued(client, from_, file, set_ or ())
        elif file is not None:
            spec = prepare_job(file, set_ or (), same_machine=client.same_files)
        else:
            raise ValueError("give a job file, or the job to continue by --from ID")
        job = client.submit(spec, idempotency_key, file=None if file is None else find_job_file(file))
        views.show_uploads(spec, job, err)
        if json_:
            tell_line(job)
        else:
            out.print(job.id, highlight=False)
        views.show_warnings(job.warnings, err)
        if follow_:
            _watch(client, job, json_)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="Job file (TOML, YAML or JSON), or name of a recipe.")],
    device_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of each accelerator; default: this machine's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kind of each accelerator, such as rtx-4090 or h200.")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=1, help="Length of an encoded prompt.")] = 128,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value of the job; repeatable.")] = None,
    json_: Json = False,
) -> None:
    """Predict a job's memory, work and traffic from the configurations in its model folder."""
    card = None if device is None else card_named(device)
    spec = prepare_job(file, set_ or (), same_machine=True)
    family_of(spec.model.path)  # before torch is imported, which takes a while
    from flowfleet.cli.submission import num_held_out
    from flowfleet.planning.plan import found_memory_gib, predict
    from flowfleet.planning.report import show_plan

    known = device_memory or (found_memory_gib() if card is None else card.memory_gib)
    held_out = num_held_out(spec)
    planned = predict(spec, device_memory_gib=known, card=card, text_tokens=text_tokens, held_out=held_out)
    tell(planned.to_json(), json_, lambda: show_plan(spec, planned, out))


app.command("settings")(show_settings)
app.command()(doctor)


@app.command()
def jobs(
    status: Annotated[str | None, typer.Option(help="Only jobs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs, newest first.")] = 20,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """List jobs."""
    with Client(url, ca=ca) as client:
        found = list(islice(client.jobs(status), limit))
    tell(found, json_, lambda: out.print(views.jobs_table(found)))


@app.command()
def show(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show a job: status, progress, results, settings."""
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
    tell(job, json_, lambda: views.show_job(job, out))


@app.command()
def watch(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Follow a job until it ends."""
    with Client(url, ca=ca) as client:
        _watch(client, client.find(job_id), json_)


@app.command()
def fleet(url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show rollout replicas, rewards, and pods that the cluster cannot schedule."""
    with Client(url, ca=ca) as client:
        found = client.fleet()
    tell(found, json_, lambda: views.show_fleet(found, out))


app.command()(samples)
app.command()(track)
app.command("redis-acl")(redis_acl)
app.command("check-reward")(check_reward)
app.command("check-model")(models.check_model)
app.command("models")(models.list_models)
app.command("try-reward")(try_reward)


_steering(Client.cancel, "Stop a job for good; its files stay.")
_steering(Client.pause, "Pause a job: running commands end, no others start. Other jobs of its pool wait behind it.")
_steering(Client.resume, "Resume a paused job.")
app.command("eval")(evaluation.evaluate_models)
_steering(Client.finish, "End a job now and keep its model: validated, saved and exported as at its planned end.")
app.command()(models.extend)
app.command("set")(models.set_)
app.command()(profiling.profile)
app.command()(attach.attach)
app.command()(models.export)
app.command()(models.push)


@app.command()
def delete(
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Job, or the beginning of its id.")] = None,
    before: Annotated[
        datetime | None, typer.Option(metavar="TIME", help="All jobs that ended before, in UTC: 2026-08-31T12:00:00.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Remove checkpoints, models and logs too.")] = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Remove an ended job and its history; its archive stays, and without --files its checkpoints and models."""
    if (job_id is None) == (before is None):
        raise ValueError("give the ID of a job, or --before TIME")
    with Client(url, ca=ca) as client:
        if before is None:
            views.say(client.delete(client.find(str(job_id)).id, files=files), json_)
            return
        end = before.replace(tzinfo=UTC)
        found = [job.id for job in client.jobs() if job.ended_at is not None and job.ended_at < end]
        deleted, failed = _delete_each(client, found, files)
    tell(deleted, json_, lambda: out.print(views.jobs_table(deleted)))
    if failed:
        err.print(*failed, sep="\n", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _delete_each(client: Client, job_ids: list[str], files: bool) -> tuple[list[Job], list[str]]:
    """Returns the deleted jobs, and why others stay; leaves out those that are gone."""
    deleted: list[Job] = []
    failed: list[str] = []
    for number, job_id in enumerate(job_ids):
        try:
            deleted.append(client.delete(job_id, files=files))
        except ApiError as error:
            if error.status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):  # the controller removed it meanwhile
                continue
            failed.append(f"job {job_id}: {error}")
            if error.status != httpx.codes.CONFLICT:  # it concerns all jobs
                failed.append(f"{len(job_ids) - number - 1} more jobs were not tried: run the command again")
                break
    return deleted, failed


@app.command()
def archived(
    archive: Annotated[str, typer.Argument(metavar="URL", help="The controller's FLOWFLEET_ARCHIVE.")],
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Job to show; default: list all.")] = None,
    json_: Json = False,
) -> None:
    """List or show the jobs of an archive, without a controller."""
    from flowfleet.client.archive import Archive

    found = Archive(archive)
    if job_id is None:
        jobs = list(found.jobs())
        tell(jobs, json_, lambda: out.print(views.jobs_table(jobs)))
    else:
        job = found.job(job_id)
        tell(job, json_, lambda: views.show_job(job, out))


# -- parts -----------------------------------------------------------------------------------------------------------


def _watch(client: Client, job: Job, as_json: bool) -> None:
    events = client.events(job.id)
    if as_json:
        for event in events:
            tell_line(event)
    else:
        follow(job, events, out)
    ended = client.job(job.id)
    if ended.status != "succeeded":
        err.print(f"the job {ended.status}" + (f": {ended.reason}" if ended.reason else ""), highlight=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
