"""`flowfleet submit --check`: reads a job's data from this machine, as the controller will when the job runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape

from flowfleet.job.spec import JobSpec
from flowfleet.prompts.stores import read_prompts

_SHOWN = 100


def check_data(spec: JobSpec) -> list[dict[str, Any]]:
    """Number, first prompt and metadata of each data set. Raises ValueError with all that is wrong."""
    problems, found = [], []
    for setting, place, columns in spec.data_files:
        try:
            prompts = read_prompts(place, columns)
        except ValueError as error:
            problems.append(f"{setting}: {error}")
            continue
        first = prompts[0]
        about = {"first": first.text, "metadata": list(first.metadata)}
        found.append({"data": setting.removeprefix("data."), "prompts": len(prompts), **about})
    if problems:
        raise ValueError("\n".join(problems))
    return found


def show_data(found: Iterable[dict[str, Any]], out: Console) -> None:
    """Prints a line or two of each data set."""
    for one in found:
        first = escape(repr(one["first"][:_SHOWN]))
        out.print(f"data.{one['data']}: {one['prompts']} prompts, first {first}", highlight=False)
        if one["metadata"]:
            out.print(f"  metadata: {escape(', '.join(one['metadata']))}", highlight=False)
