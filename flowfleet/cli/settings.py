"""`flowfleet settings`: describes the settings of a job."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flowfleet import plugins
from flowfleet.cli.options import Json, out, tell
from flowfleet.job.reference import Setting, find, near, settings
from flowfleet.job.spec import JobSpec


def show_settings(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A setting, a table of them, a loss, or a word such as lr.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a job file.")] = False,
    json_: Json = False,
) -> None:
    """Describe the settings of a job: what they mean, what they may hold, their defaults."""
    if schema:
        tell(JobSpec.model_json_schema(), True, lambda: None)
        return
    plugins.load()
    known = list(settings(JobSpec))
    shown = find(name, known) if name else known
    if not shown:
        hint = " or ".join(near(name or "", known))
        raise ValueError(f"{name}: unknown setting" + (f"; did you mean {hint}?" if hint else ""))
    tell(shown, json_, lambda: _show(shown))


def _show(shown: Sequence[Setting]) -> None:
    if len(shown) > 1:
        table = Table("setting", "values", "default", "what", box=None)
        for row in shown:
            table.add_row(row.name, row.values.replace("`", ""), row.default, row.description.replace("`", ""))
        out.print(table)
        return
    (row,) = shown
    about = f"  {row.values.replace('`', '')}; default: {row.default}"
    out.print(Text.assemble((row.name, "bold"), about))
    out.print(row.description, highlight=False, markup=False)
