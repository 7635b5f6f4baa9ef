"""`flowfleet eval`: held-out rewards of a model and its adapters as one table, and their pictures on one page
(docs/evaluation.md)."""

from __future__ import annotations

import json
import webbrowser
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flowfleet.api.jobs import JobStatus
from flowfleet.cli import views
from flowfleet.cli.options import Ca, Json, Url, err, out, tell
from flowfleet.cli.samples.command import ROOM_BYTES, media_of
from flowfleet.client.client import Client
from flowfleet.client.evaluation import evaluate
from flowfleet.client.evaluation.comparison import TOTAL, Estimate, Evaluated, as_json, columns
from flowfleet.filesystem import writing

if TYPE_CHECKING:
    from flowfleet.cli.samples.page import Shown

DIRECTORY = Path("runs/eval")
PROMPTS = 16


def evaluate_models(
    file: Annotated[
        Path | None, typer.Argument(help="Job file (TOML, YAML or JSON), or name of a recipe; optional with --from.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="ID[@STEP]", help="Evaluate a job's model; without FILE, with its settings."),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="PATH|job:ID[@STEP]", help="Adapter to evaluate; repeatable.")
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Also the model without an adapter.")] = True,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, e.g. schedule.validation_samples=4; repeatable."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for pictures and numbers (runs/eval/ID).")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts on the page of pictures.")] = PROMPTS,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Score held-out prompts with a model and its adapters, side by side, from the same seeds."""

    def say(line: str) -> None:
        err.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    with Client(url, ca=ca) as client:
        models = evaluate(client, file, adapter or (), origin=from_, base=base, changes=set_ or (), say=say)
        known = [model for model in models if model.job.status is JobStatus.SUCCEEDED]
        folder = to or DIRECTORY / models[0].job.id[: views.SHORT_ID]
        page = _written(client, known, prompts, folder) if known else None
    tell(as_json(models), json_, lambda: _show(models, page))
    if open_ and page is not None:
        webbrowser.open(page.resolve().as_uri())
    if len(known) < len(models):
        raise typer.Exit(1)


def _show(models: Sequence[Evaluated], page: Path | None) -> None:
    out.print(_table(models))
    if page is not None:
        out.print(f"\n{page}", highlight=False, soft_wrap=True)


def _table(models: Sequence[Evaluated]) -> Table:
    names = columns(models)
    made = views.table("MODEL", "JOB", "SAMPLES", *(name.upper() if name == TOTAL else name for name in names))
    for model in models:
        cells = [_cell(model, models[0], name) for name in names]
        if model.job.status is not JobStatus.SUCCEEDED:
            cells = [f"{model.job.status}: {model.job.reason}", *("" for _ in names[1:])]
        made.add_row(model.label, model.job.id[: views.SHORT_ID], str(len(model.samples)), *cells)
    made.caption = "mean ± standard error over the prompts; in parentheses the change from the first model, paired"
    made.caption_justify = "left"
    return made


def _cell(model: Evaluated, first: Evaluated, name: str) -> str:
    change = None if model is first else model.change(first, name)
    return _shown(model.score(name)) + ("" if change is None else f" ({_shown(change, sign='+')})")


def _shown(known: Estimate | None, sign: str = "") -> str:
    if known is None:
        return "–"
    return f"{known.mean:{sign}.3f}" + ("" if known.error is None else f" ± {known.error:.3f}")


def _written(client: Client, models: Sequence[Evaluated], prompts: int, folder: Path) -> Path:
    """Writes the page and the numbers, and returns the page's place."""
    from flowfleet.cli.samples.page import side_by_side

    rows = list(_rows(client, models, prompts))
    num_prompts = len({sample.group for model in models for sample in model.samples})
    title = " · ".join(model.label for model in models)
    facts = f"prompts: {len(rows)} of {num_prompts} shown · the pictures of a prompt share its seeds"
    folder.mkdir(parents=True, exist_ok=True)
    numbers: list[dict[str, Any]] = as_json(models)
    page = folder / "index.html"
    with writing(folder):
        (folder / "evaluation.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        page.write_text(side_by_side(title, facts, "", rows), encoding="utf-8")
    return page


def _rows(client: Client, models: Sequence[Evaluated], prompts: int) -> Iterator[list[Shown]]:
    """The samples of the first prompts, by index and then model, while there is room."""
    from flowfleet.cli.samples.page import Shown

    by_group: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, model in enumerate(models):
        for index, sample in enumerate(model.samples):
            by_group[sample.group].append((number, index))
    size = 0
    for group in sorted(by_group)[:prompts]:
        row = []
        for number, index in sorted(by_group[group], key=lambda at: (models[at[0]].samples[at[1]].index, at[0])):
            model, sample = models[number], models[number].samples[index]
            media = media_of(client, model.job, sample)
            size += len(media or b"")
            row.append(Shown(sample, media, note=model.label))
        yield row
        if size >= ROOM_BYTES:
            return
