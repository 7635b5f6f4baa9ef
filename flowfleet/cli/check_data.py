"""`flowfleet submit --check`: reads a job's data from this machine, as the controller will when the job runs."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from flowfleet.job.spec import JobSpec
from flowfleet.prompts.stores import read_prompts

_SHOWN = 100


def check_data(spec: JobSpec, out: Console) -> None:
    """Prints number and first prompt of each data set. Raises ValueError with all that is wrong."""
    problems = []
    for name, place, columns in (
        ("train", spec.data.train, spec.data.columns(spec.method.data)),
        ("validation", spec.data.validation, spec.data.columns("prompts")),
    ):
        if place is None:
            continue
        try:
            prompts = read_prompts(place, columns)
        except ValueError as error:
            problems.append(f"data.{name}: {error}")
            continue
        first = prompts[0]
        out.print(f"data.{name}: {len(prompts)} prompts, first {escape(repr(first.text[:_SHOWN]))}", highlight=False)
        if first.metadata:
            out.print(f"  metadata: {escape(', '.join(first.metadata))}", highlight=False)
    if problems:
        raise ValueError("\n".join(problems))
