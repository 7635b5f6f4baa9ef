"""`flowfleet doctor`: prints a line for each need of a stack, a client or a job, with advice."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from flowfleet.cli.doctor.controller import look_at_controller
from flowfleet.cli.doctor.finding import Finding, Status, as_notes
from flowfleet.cli.doctor.machine import look_at_machine
from flowfleet.cli.doctor.packages import look_at_packages
from flowfleet.cli.options import Ca, Json, Url, out, tell
from flowfleet.cli.views import table
from flowfleet.client import Client
from flowfleet.local.stack import DEFAULT_STATE_DIR, StateDir

_COLORS = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}


def doctor(
    state_dir: Annotated[Path, typer.Option(help="Directory of the stack.")] = DEFAULT_STATE_DIR,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Check what a stack needs on this machine, and the controller; exits with 1 if something is wrong."""
    is_named = bool(url or os.environ.get("FLOWFLEET_URL"))
    with Client(url, ca=ca) as client:
        here = [*look_at_packages(), *look_at_machine(StateDir(state_dir))]
        findings_here = here if client.on_this_machine else as_notes(here)
        findings = [*findings_here, *look_at_controller(client, is_named)]
    tell(findings, json_, lambda: _show(findings))
    if any(finding.status is Status.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _show(findings: Sequence[Finding]) -> None:
    made = table("", "CHECK", "FOUND")
    for finding in findings:
        text = f"{finding.found}\n→ {finding.advice}" if finding.advice else finding.found
        made.add_row(Text(finding.status, style=_COLORS[finding.status]), finding.check, Text(text))
    out.print(made)
