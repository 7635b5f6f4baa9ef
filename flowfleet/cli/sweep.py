"""`flowfleet sweep`: jobs for the values of some settings, as one thing (docs/sweeps.md)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer

from flowfleet.api.overview import JobRow
from flowfleet.api.problems import ApiError
from flowfleet.cli import models, views
from flowfleet.cli.options import Ca, Json, Url, err, out, tell
from flowfleet.cli.rewards.command import ShowGroup
from flowfleet.client import Client
from flowfleet.client.progress import number
from flowfleet.client.standings import FIGURES, fallen_behind, settings_of, standings
from flowfleet.job.sweeps import asked_sweep, label, plan_sweep, shown, values_by_setting

about = "Queue a job for each combination of settings, as `flowfleet sweep FILE --set seed=0..2`; steer them together."
app = typer.Typer(cls=ShowGroup, no_args_is_help=True, help=about)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a sweep; `flowfleet sweep list` lists them.")]
Values = typer.Option("--set", help="key=values, as 1e-5,1e-4 or 0..2 or [[1,2],[3]]; repeatable.")
Best = Annotated[bool, typer.Option("--best", help="Of the best settings; required.")]
Worse = Annotated[float, typer.Option(min=0, metavar="REWARD", help="Difference that ends a job.")]
After = Annotated[int, typer.Option(min=0, metavar="STEP", help="Rewards before this step do not count.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="New folder; default: JOB-step-N.")]


@app.command()
def start(
    file: Annotated[Path, typer.Argument(help="Job file (TOML, YAML or JSON), or name of a recipe.")],
    set_: Annotated[list[str], Values],
    zipped: Annotated[bool, typer.Option("--zip", help="First values together, then second ones: no grid.")] = False,
    name: Annotated[str, typer.Option(help="Name of the sweep; default: made from its jobs.")] = "",
    at_once: Annotated[int | None, typer.Option(min=1, metavar="K", help="Most jobs that run at once.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the jobs; asks no controller.")] = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Check all jobs, then queue them: `flowfleet sweep FILE --set KEY=VALUES` does the same."""
    values = values_by_setting(set_)
    if dry_run:
        asked = asked_sweep(file, values, zipped=zipped, name=name, same_machine=True)
        rows = [label(part.settings) for part, _ in plan_sweep(asked)]
        tell(rows, json_, lambda: _say(asked["name"], rows))
        return
    with Client(url, ca=ca) as client:
        queued = client.sweep(file, values, zipped=zipped, name=name, at_once=at_once)
    views.show_warnings(dict.fromkeys(text for job in queued for text in job.warnings), err)
    name = queued[0].sweep.name if queued[0].sweep else name
    tell(queued, json_, lambda: _say(name, [f"{job.id}  {label(settings_of(job))}" for job in queued]))


@app.command()
def show(name: Name, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show rewards by settings, the best first, with 95 % intervals over seeds."""
    with Client(url, ca=ca) as client:
        rows = standings(client.sweep_jobs(name))
    names = list(dict.fromkeys(setting for row in rows for setting in row["settings"]))
    made = views.table(*names, "JOBS", *(figure.replace("_", " ").upper() for figure in FIGURES))
    for row in rows:
        cells = [shown(row["settings"].get(setting, "")) for setting in names]
        made.add_row(*cells, _counts(row["statuses"]), *(_figure(row[figure]) for figure in FIGURES))
    made.caption, made.caption_justify = "mean ± half of the 95 % interval over seeds", "left"
    tell(rows, json_, lambda: out.print(made))


@app.command("list")
def list_(url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """List sweeps, the one with the newest job first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with Client(url, ca=ca) as client:
        for job in client.jobs():
            if job.sweep is not None:
                found[job.sweep.name][str(job.status)] += 1
    tell(found, json_, lambda: _say("sweeps", [f"{name}: {_counts(each)}" for name, each in found.items()]))


@app.command()
def cancel(name: Name, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Cancel the jobs that have not ended; their files stay."""
    _end(name, url, ca, json_, lambda _, jobs: {job.id: "cancelled" for job in jobs})


@app.command()
def finish(name: Name, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """End the jobs now and keep their models; those that have not trained a step are cancelled."""
    _end(
        name, url, ca, json_, lambda _, jobs: {job.id: "finished" if job.progress.step else "cancelled" for job in jobs}
    )


@app.command()
def stop(
    name: Name, worse_than_best: Worse, after: After = 0, url: Url = None, ca: Ca = None, json_: Json = False
) -> None:
    """Cancel jobs whose newest held-out reward (without any: training reward) is worse than the best at its step."""

    def behind(client: Client, jobs: Sequence[JobRow]) -> dict[str, str]:
        rows = {job.id: list(client.metrics(job.id, after - 1)) for job in jobs}
        held_out = any("val/reward" in row.values for found in rows.values() for row in found)
        metric = "val/reward" if held_out else "critic/rewards/mean"
        known = {job: {row.step: row.values.get(metric) for row in found} for job, found in rows.items()}
        found = fallen_behind(known, worse_than_best)
        return {job: f"cancelled: {own:.3g} at step {at}, best {best:.3g}" for job, (at, own, best) in found.items()}

    _end(name, url, ca, json_, behind)


@app.command()
def export(name: Name, best: Best, out_: Out = None, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Bring a model to this machine: of the best settings, that of the job with the best held-out reward."""
    with Client(url, ca=ca) as client:
        job_id = standings(client.sweep_jobs(name))[0]["jobs"][0]
    models.export(job_id, None, False, None, out_, url, ca, json_)


Choice = Callable[[Client, Sequence[JobRow]], Mapping[str, str]]
"""Chooses the jobs that end, and how."""


def _end(name: str, url: str | None, ca: Path | None, json_: bool, choose: Choice) -> None:
    """Ends the chosen jobs, the newest first, so that no queued one starts in a place that becomes free."""
    ended = []
    with Client(url, ca=ca) as client:
        jobs = client.sweep_jobs(name)
        chosen = choose(client, jobs)
        for job in reversed([job for job in jobs if job.id in chosen and not job.status.terminal]):
            try:
                ended.append(client.finish(job.id) if chosen[job.id] == "finished" else client.cancel(job.id))
            except ApiError as error:
                if error.status != httpx.codes.CONFLICT:  # else it has ended meanwhile
                    raise
    tell(ended, json_, lambda: _say(name, [f"{job.id}  {label(settings_of(job))}  {chosen[job.id]}" for job in ended]))


def _figure(known: tuple[float, float | None] | None) -> str:
    mean, half = known or (None, None)
    return number(mean) + ("" if half is None else f" ± {number(half)}")


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in found.items())


def _say(what: str, lines: Sequence[str]) -> None:
    out.print(f"{what}: {len(lines)}", *lines, sep="\n", highlight=False, soft_wrap=True)
