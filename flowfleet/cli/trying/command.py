"""`flowfleet try-reward`: tries a reward before a job uses it, or scores samples that a job made with another
reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample
from flowfleet.cli.options import Ca, Json, Url, err, out, tell
from flowfleet.cli.rewards.check import pairs
from flowfleet.cli.views import table
from flowfleet.client.client import Client
from flowfleet.client.progress import number
from flowfleet.job.spec import parse_job

if TYPE_CHECKING:
    from flowfleet.cli.trying.scoring import Trial, Tried
    from flowfleet.rewards.requests import EncodedSample

LIMIT: Final = 16
Pairs = list[str] | None


def try_reward(
    reward: Annotated[
        str, typer.Argument(metavar="REWARD", help="SCORER[:key=value,…], FILE.py:FUNCTION, or HOST:PORT of a service.")
    ],
    pictures: Annotated[list[Path] | None, typer.Argument(metavar="[FILE…]", help="Pictures or MP4s to score.")] = None,
    prompt: Annotated[str, typer.Option(help="Prompt of the files.")] = "",
    metadata: Annotated[Pairs, typer.Option(help="KEY=VALUE of each sample; repeatable.")] = None,
    param: Annotated[Pairs, typer.Option(help="KEY=VALUE of each call, as `params` of a job; repeatable.")] = None,
    job_id: Annotated[
        str | None, typer.Option("--job", metavar="ID", help="Score this job's samples, and compare with its scores.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="Reward of the job to compare with; default: its only one.")
    ] = None,
    purpose: Annotated[str, typer.Option(help="train or validate, with --job.")] = "train",
    step: Annotated[int | None, typer.Option(help="All samples of this step, with --job.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Newest samples of the job, without --step.")] = LIMIT,
    timeout: Annotated[float, typer.Option(min=0.1, help="Limit on each call and on the start, in seconds.")] = 300.0,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Score pictures, or a job's samples, by a reward; it is started as `flowfleet up --reward` starts it."""
    from flowfleet.cli.trying.scoring import try_reward as ask
    from flowfleet.cli.trying.service import parse_tried, serving

    tried = parse_tried(reward)
    if bool(pictures) == bool(job_id):
        raise ValueError("give files to score, or the job whose samples to score by --job ID")
    given, params, stored = pairs("--metadata", metadata or ()), pairs("--param", param or ()), dict[str, Any]()
    if job_id is None:
        samples = [_of_file(path, prompt, given) for path in pictures or ()]
    else:
        with Client(url, ca=ca) as client:
            job = client.find(job_id)
            listed = client.samples(job.id, purpose=purpose, step=step)
            rows = list(listed if step is not None else islice(listed, limit))
            if not rows:
                raise ValueError(f"job {job.id} has no such {purpose} samples")
            name = _compared_with(job, name)
            params = dict(job.rewards.active.rewards[name].get("params") or {}) | params
            known = _metadata(job)
            samples = [_of_job(client, job, row, {**known.get(row.prompt, {}), **given}) for row in rows]
        stored = {_name(row): row.scores.get(name) for row in rows}
    with serving(tried, timeout) as address:
        trial = ask(address, samples, params, timeout, stored)
    tell(trial, json_, lambda: _show(trial))
    if any(sample.error for sample in trial.samples):
        raise typer.Exit(1)


# -- samples ---------------------------------------------------------------------------------------------------------


def _of_file(path: Path, prompt: str, metadata: Mapping[str, str]) -> EncodedSample:
    from flowfleet.conformance.media import read
    from flowfleet.rewards.requests import EncodedSample

    data, media_type = read(path)
    return EncodedSample(data, media_type, prompt, metadata, group_id=str(path), sample_id=str(path))


def _of_job(client: Client, job: Job, row: Sample, metadata: Mapping[str, str]) -> EncodedSample:
    from flowfleet.rewards.requests import EncodedSample

    data = client.media(job.id, row)
    return EncodedSample(data, row.media_type, row.prompt, metadata, f"{row.step}/{row.group}", _name(row))


def _name(row: Sample) -> str:
    return f"{row.step}/{row.group}/{row.index}"


def _compared_with(job: Job, name: str | None) -> str:
    """The reward of this name, else the job's only one."""
    names = list(job.rewards.active.rewards)
    if name and name not in names:
        raise ValueError(f"--as {name}: the job has the rewards {', '.join(names)}")
    if not name and len(names) != 1:
        raise ValueError(f"the job has the rewards {', '.join(names) or 'none'}: say by --as which to compare with")
    return name or names[0]


def _metadata(job: Job) -> dict[str, Mapping[str, str]]:
    """Metadata by prompt, of data that can be read from here. Samples carry the prompt alone."""
    from flowfleet.prompts.stores import read_prompts

    known: dict[str, Mapping[str, str]] = {}
    for setting, source, columns in parse_job(job.spec).data_files:
        try:
            known |= {prompt.text: prompt.metadata for prompt in read_prompts(source, columns)}
        except ValueError as error:
            text = f"metadata of the prompts of {setting} is not sent: {error}"
            err.print(Text.assemble(("note:", "yellow"), f" {text}"))
    return known


# -- what is shown ---------------------------------------------------------------------------------------------------


def _show(trial: Trial) -> None:
    is_compared = trial.stored_mean is not None
    made = table("SAMPLE", "SCORE", *(("STORED", "DIFFERENCE") if is_compared else ()), "COMPONENTS")
    for sample in trial.samples:
        made.add_row(sample.sample, *_cells(sample, is_compared))
    out.print(made)
    parts = [trial.service, f"mean {number(trial.mean)}"]
    if is_compared:
        parts += [f"stored mean {number(trial.stored_mean)}", f"largest difference {number(trial.largest_difference)}"]
        parts.append(f"rank correlation {number(trial.rank_correlation)}")
    out.print("\n" + ", ".join(parts), highlight=False, markup=False)


def _cells(sample: Tried, is_compared: bool) -> Sequence[str | Text]:
    last = ", ".join(f"{name} {number(value)}" for name, value in sample.components.items())
    beside = [number(sample.stored), number(sample.difference)] if is_compared else []
    return [number(sample.score), *beside, Text(sample.error, style="red") if sample.error else Text(last)]
