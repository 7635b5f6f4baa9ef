"""`flowfleet chaos`: faults on a stack of its own, and a report."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowfleet.cli.options import Json, out, tell

if TYPE_CHECKING:
    from tests.faults.report import Report


def chaos(
    faults: Annotated[int, typer.Option(min=1, help="Number of faults that must count.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the schedule.")] = 1,
    mode: Annotated[Literal["lora", "full"], typer.Option(help="What the job trains.")] = "lora",
    job: Annotated[Path | None, typer.Option(help="Job file in place of the tiny one.")] = None,
    kinds: Annotated[str, typer.Option(help="Faults to draw from, with commas; default: all.")] = "",
    state_dir: Annotated[Path, typer.Option(help="Folder of the stacks and the ledger; contents are replaced.")] = Path(
        "runs/chaos"
    ),
    report: Annotated[Path | None, typer.Option(help="JSON file; default: report.json in --state-dir.")] = None,
    reference: Annotated[str, typer.Option(help="Hash of the weights without faults; default: run it.")] = "",
    spacing: Annotated[int, typer.Option(min=1, help="Steps from one fault to the next.")] = 4,
    hang_s: Annotated[float, typer.Option(min=1.0, help="The job's timeouts.hang_s.")] = 8.0,
    markdown: Annotated[
        list[Path] | None, typer.Option(help="Only print these reports as Markdown tables; repeatable.")
    ] = None,
    json_: Json = False,
) -> None:
    """Inject seeded faults into a job and compare it with an undisturbed run."""
    from tests.faults.report import Report, as_markdown

    if markdown:
        reports = [Report.model_validate_json(path.read_bytes()) for path in markdown]
        tell(reports, json_, lambda: typer.echo(as_markdown(reports), nl=False))
        return
    from tests.faults.run import Options, run_chaos
    from tests.faults.schedule import KINDS

    chosen = tuple(name.strip() for name in kinds.split(",")) if kinds else KINDS
    options = Options(faults, seed, mode, job, state_dir, chosen, report, reference, spacing, hang_s)
    found = run_chaos(options, partial(_say, aside=json_))
    tell(found, json_, lambda: _show(found))
    if not found.passed:
        raise typer.Exit(1)


def _show(found: Report) -> None:
    from tests.faults.report import as_table, summary

    out.print(as_table(found))
    for line in summary(found):
        out.print(line, highlight=False, soft_wrap=True, markup=False)


def _say(text: str, *, aside: bool = False) -> None:
    """A line of progress with the time; flushed, for logs that are followed. `aside`: on stderr."""
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=aside)
