"""`flowfleet doctor`: a line for each thing that a stack, a client or a job needs, with what to do about it."""

from __future__ import annotations

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
from flowfleet.cli.options import Ca, Json, Url, connect, out, tell
from flowfleet.cli.views import table
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
    with connect(url, ca) as client:
        here = [*look_at_packages(), *look_at_machine(StateDir(state_dir))]
        own = here if client.on_this_machine else as_notes(here)
        found = [*own, *look_at_controller(client, is_named)]
    tell(found, json_, lambda: _show(found))
    if any(one.status is Status.PROBLEM for one in found):
        raise typer.Exit(1)


def _show(found: Sequence[Finding]) -> None:
    made = table("", "CHECK", "FOUND")
    for one in found:
        text = f"{one.found}\n→ {one.advice}" if one.advice else one.found
        made.add_row(Text(one.status, style=_COLORS[one.status]), one.check, Text(text))
    out.print(made)
