"""`flowfleet votes`: shows the result of people's votes on a job's samples, and exports it (docs/votes.md)."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowfleet.api.votes import VoteReport
from flowfleet.cli.options import Ca, JobId, Json, Url, err, out, tell
from flowfleet.cli.rewards.command import ShowGroup
from flowfleet.cli.views import table
from flowfleet.client import Client

app = typer.Typer(cls=ShowGroup, no_args_is_help=True, help="Show and export people's votes on a job's samples.")


@app.command()
def show(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show how voters agree with themselves, with one another and with the other rewards."""
    with Client(url, ca=ca) as client:
        report = client.vote_report(client.find(job_id).id)
    tell(report, json_, lambda: show_report(report, out))


@app.command()
def export(
    job_id: JobId,
    out_: Annotated[Path, typer.Option("--out", help="Folder for preferences.jsonl and its pictures.")],
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Write the votes as a preference file, which jobs with algorithm.name = "dpo" train on."""
    with Client(url, ca=ca) as client:
        exported = client.export_preferences(client.find(job_id).id, out_)
    if exported.left_out:
        err.print(f"{exported.left_out} pairs left out: their pictures are no longer kept", highlight=False)
    tell(asdict(exported), json_, lambda: out.print(f"{exported.pairs} pairs in {exported.file}", highlight=False))


def show_report(report: VoteReport, console: Console) -> None:
    """Voters, rewards, warnings."""
    said = f"{report.votes} votes on {report.groups} groups; {report.waiting} are waited for"
    console.print(said + f"; voters agree in {_share(report.agreement)} of shared pairs", highlight=False)
    if report.voters:
        voters = table("VOTER", "VOTES", "REPEATS", "CONSISTENT", "SHARED", "AGREES WITH OTHERS")
        for voter in report.voters:
            shares = (str(voter.repeats), _share(voter.consistency), str(voter.shared), _share(voter.agreement))
            voters.add_row(voter.name, str(voter.votes), *shares)
        console.print(voters)
    if report.rewards:
        rewards = table("REWARD", "PAIRS", "AGREES WITH VOTES")
        for name, row in report.rewards.items():
            rewards.add_row(name, str(row.pairs), _share(row.agreement))
        console.print(rewards)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
