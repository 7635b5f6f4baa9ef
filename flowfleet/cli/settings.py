"""`flowfleet settings`: describes the settings of a job."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flowfleet.cli.options import out
from flowfleet.job.reference import Setting, find, near, settings
from flowfleet.job.spec import JobSpec


def show_settings(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A setting, a table of them, or a word such as lr.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a job file.")] = False,
) -> None:
    """Describe the settings of a job: what they mean, what they may hold, their defaults."""
    if schema:
        out.print_json(data=JobSpec.model_json_schema())
        return
    known = list(settings(JobSpec))
    found = find(name, known) if name else known
    if not found:
        hint = " or ".join(near(name or "", known))
        raise ValueError(f"{name}: unknown setting" + (f"; did you mean {hint}?" if hint else ""))
    if json_:
        out.print_json(data=[vars(one) for one in found])
    elif len(found) == 1:
        _show(found[0])
    else:
        table = Table("setting", "values", "default", "what", box=None)
        for one in found:
            table.add_row(one.name, one.values.replace("`", ""), one.default, one.description.replace("`", ""))
        out.print(table)


def _show(one: Setting) -> None:
    out.print(f"[bold]{one.name}[/bold]  {one.values.replace('`', '')}; default: {one.default}", highlight=False)
    out.print(one.description, highlight=False, markup=False)
