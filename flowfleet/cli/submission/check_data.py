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
    problems, files = [], []
    for setting, source, columns in spec.data_files:
        try:
            prompts = read_prompts(source, columns)
        except ValueError as error:
            problems.append(f"{setting}: {error}")
            continue
        first = prompts[0]
        about = {"first": first.text, "metadata": list(first.metadata)}
        files.append({"data": setting.removeprefix("data."), "prompts": len(prompts), **about})
    if problems:
        raise ValueError("\n".join(problems))
    return files


def show_data(files: Iterable[dict[str, Any]], out: Console) -> None:
    """Prints a line or two of each data set."""
    for file in files:
        first = escape(repr(file["first"][:_SHOWN]))
        out.print(f"data.{file['data']}: {file['prompts']} prompts, first {first}", highlight=False)
        if file["metadata"]:
            out.print(f"  metadata: {escape(', '.join(file['metadata']))}", highlight=False)
