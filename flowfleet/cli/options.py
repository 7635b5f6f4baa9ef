"""Options and helpers that commands share: where they print and how they find the controller."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json
from rich.console import Console

from flowfleet.cli.terminal import Terminal, escaped
from flowfleet.client.connection import DEFAULT_URL

out = Terminal(width=None if Console().is_terminal else 160)
err = Terminal(stderr=True)

Url = Annotated[
    str | None,
    typer.Option(help=f"Of the REST API; else FLOWFLEET_URL, else the local stack's, else {DEFAULT_URL}."),
]
Ca = Annotated[
    Path | None, typer.Option(help="PEM file of the CA of an https URL; else FLOWFLEET_CA, else the system's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="A job's id or the start of one, its name, or `last`.")]


def tell(value: object, as_json: bool, show: Callable[[], object]) -> None:
    """Prints a command's result: `value` as JSON, or what `show` prints for people."""
    if as_json:
        typer.echo(escaped(to_json(value, indent=2, inf_nan_mode="null")))
    else:
        show()


def tell_line(value: object) -> None:
    """Prints one JSON line of a command that prints many."""
    typer.echo(escaped(to_json(value, inf_nan_mode="null")))
