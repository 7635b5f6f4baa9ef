"""`flowfleet votes`: what people's votes on a job's samples come to, and their export (docs/votes.md)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowfleet.cli.options import Ca, JobId, Json, Url, connect, err, out, tell
from flowfleet.cli.rewards.command import ShowGroup
from flowfleet.cli.views import table
from flowfleet.client.votes import VoteReport

app = typer.Typer(cls=ShowGroup, no_args_is_help=True, help="Show and export people's votes on a job's samples.")


@app.command()
def show(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show how voters agree with themselves, with one another and with the other rewards."""
    with connect(url, ca) as client:
        found = client.vote_report(client.find(job_id).id)
    tell(found, json_, lambda: show_report(found, out))


@app.command()
def export(
    job_id: JobId,
    out_: Annotated[Path, typer.Option("--out", help="Folder for preferences.jsonl and its pictures.")],
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Write the votes as a preference file, which jobs with algorithm.name = "dpo" train on."""
    with connect(url, ca) as client:
        found = client.export_preferences(client.find(job_id).id, out_)
    if found.left_out:
        err.print(f"{found.left_out} pairs left out: their pictures are no longer kept", highlight=False)
    tell(asdict(found), json_, lambda: out.print(f"{found.pairs} pairs in {found.file}", highlight=False))


def show_report(found: VoteReport, console: Console) -> None:
    """Voters, rewards, warnings."""
    said = f"{found.votes} votes on {found.groups} groups; {found.waiting} are waited for"
    console.print(said + f"; voters agree in {_share(found.agreement)} of shared pairs", highlight=False)
    if found.voters:
        voters = table("VOTER", "VOTES", "REPEATS", "CONSISTENT", "SHARED", "AGREES WITH OTHERS")
        for one in found.voters:
            shares = (str(one.repeats), _share(one.consistency), str(one.shared), _share(one.agreement))
            voters.add_row(one.name, str(one.votes), *shares)
        console.print(voters)
    if found.rewards:
        rewards = table("REWARD", "PAIRS", "AGREES WITH VOTES")
        for name, row in found.rewards.items():
            rewards.add_row(name, str(row.pairs), _share(row.agreement))
        console.print(rewards)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
