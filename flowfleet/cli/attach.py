"""`flowfleet attach`: how to start a job's trainer oneself."""

import typer

from flowfleet.cli.options import Ca, JobId, Json, Url, tell
from flowfleet.client import Client


def attach(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Print the command that starts the ranks of a job with `trainer.launcher = "attach"`."""
    with Client(url, ca=ca) as client:
        found = client.attach(client.find(job_id).id)
    tell(found, json_, lambda: typer.echo(found.command))
