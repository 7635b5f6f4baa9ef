"""`flowfleet samples`: pictures of a job with their scores, as files, or as a page to judge the rewards by looking."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flowfleet.api.jobs import Job
from flowfleet.api.problems import ApiError
from flowfleet.api.samples import EXTENSIONS, Sample
from flowfleet.cli import views
from flowfleet.cli.options import Ca, JobId, Json, Url, out, tell
from flowfleet.client.client import Client
from flowfleet.filesystem import writing

if TYPE_CHECKING:
    from flowfleet.cli.rewards.disagreement import Disagreement
    from flowfleet.cli.samples.page import Shown

DIRECTORY: Final = Path("runs/samples")
LIMIT: Final = 16
LOOKED_AT: Final = 4096
"""Newest samples that a page is made from."""
ROOM_BYTES: Final = 48 * 2**20
"""Maximum bytes of media on a page before the requested samples' neighbors are left out."""
NOT_FOUND: Final = 404


def samples(
    job_id: JobId,
    to: Annotated[
        Path | None, typer.Option("--out", help="Directory for the pictures, or FILE.html (runs/samples/ID).")
    ] = None,
    purpose: Annotated[str, typer.Option(help="train or validate.")] = "train",
    step: Annotated[int | None, typer.Option(help="Only this step; for validation: this policy version.")] = None,
    order: Annotated[str | None, typer.Option(help="newest (default), oldest, best or worst.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"At most so many ({LIMIT}).")] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Write a page of N low rewards, the lowest first.")
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Write a page of N high rewards, the highest first.")
    ] = None,
    disagree: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Write a page of the N samples on which rewards disagree most."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Download a job's pictures and print their scores, or write a page of those worth looking at."""
    asked = {name: n for name, n in (("worst", worst), ("best", best), ("disagree", disagree)) if n is not None}
    if len(asked) > 1:
        raise ValueError(f"--{' and --'.join(asked)}: give one of them")
    if asked and (order or limit):
        raise ValueError("--order and --limit are for downloads: a page has the samples that it is of")
    if open_ and not asked:
        raise ValueError("--open shows a page: give --worst, --best or --disagree")
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
        directory = DIRECTORY / job.id[: views.SHORT_ID]
        if not asked:
            listed = client.samples(job.id, purpose=purpose, step=step, order=order or "newest")
            _download(client, job, list(islice(listed, limit or LIMIT)), to or directory, json_)
            return
        ((kind, num),) = asked.items()
        file = to or directory / f"{kind}.html"
        if file.suffix != ".html" or file.is_dir():
            raise ValueError(f"--out {file}: name the page, as in page.html")
        written = _page(client, job, kind, num, purpose, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing(file):
        file.write_text(written, encoding="utf-8")
    said = f"{file}  {len(written) / 2**20:.1f} MiB"
    tell({"file": file}, json_, lambda: out.print(said, highlight=False, soft_wrap=True))
    if open_:
        webbrowser.open(file.resolve().as_uri())


def _download(client: Client, job: Job, listed: Sequence[Sample], directory: Path, as_json: bool) -> None:
    found = [media_of(client, job, sample) for sample in listed]
    files = [
        None if media is None else _save(media, sample, directory) for sample, media in zip(listed, found, strict=True)
    ]
    rows = [{**sample.model_dump(), "file": file} for sample, file in zip(listed, files, strict=True)]
    tell(rows, as_json, lambda: out.print(views.samples_table(listed, files)))


def _save(picture: bytes, sample: Sample, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    suffix = EXTENSIONS.get(sample.media_type) or sample.media_type.rpartition("/")[2]
    path = directory / f"{sample.purpose}-{sample.step:05d}-{sample.group:03d}-{sample.index:03d}.{suffix}"
    with writing(path):
        path.write_bytes(picture)
    return path


def _page(client: Client, job: Job, kind: str, num: int, purpose: str, step: int | None) -> str:
    """Raises ValueError where there is nothing to show."""
    from flowfleet.cli.samples.page import page

    where = "" if step is None else f" of step {step}" if purpose == "train" else f" of version {step}"
    if kind == "disagree":
        heading = f"Where the scorers disagree most{where}"
        remark, picked = _disagreeing(client, job, num, purpose, step)
    else:
        from flowfleet.cli.samples.page import picks

        extreme = "lowest" if kind == "worst" else "highest"
        heading = f"The {extreme} rewards{where}"
        newest = islice(client.samples(job.id, purpose=purpose, step=step), LOOKED_AT)
        picked = [(sample, "") for sample in picks(newest, num, best=kind == "best")]
        remark = f"The {extreme} of each prompt, from the newest steps that fill the page; ranked by reward."
    if not picked:
        raise ValueError(f"job {job.id} has no {purpose} samples{where} that fit")
    return page(job, heading, list(_with_groups(client, job, picked)), remark)


def _disagreeing(
    client: Client, job: Job, num: int, purpose: str, step: int | None
) -> tuple[str, list[tuple[Sample, str]]]:
    """Returns a remark about the comparison, and the samples with their reasons."""
    from flowfleet.cli.rewards.disagreement import disagreements

    newest = list(islice(client.samples(job.id, purpose=purpose, step=step), LOOKED_AT))
    rewards = client.rewards(job.id)
    shadows = [item for revision in (*rewards.history, rewards.active) for item in revision.shadows.items()]
    beside = {name: str(part["for"]) for name, part in shadows}  # what each was compared with last
    picked = disagreements(newest, beside)[:num]
    remark = (
        f"Of the newest {len(newest)} samples those whose places in their group differ most between two scorers. "
        "A place goes by the score's rank, from the lowest (0) to the highest (1)."
    )
    return remark, [(item.sample, _reason(item)) for item in picked]


def _reason(item: Disagreement) -> str:
    places = [
        f"{place.scorer}{' (shadow)' if place.is_shadow else ''} puts it {place.rank:g} of {place.of}"
        for place in (item.higher, item.lower)
    ]
    return f"{', '.join(places)}: {item.size[0]:.2f} apart"


def _with_groups(client: Client, job: Job, picked: Sequence[tuple[Sample, str]]) -> Iterator[Shown]:
    """Adds the other samples of the requested samples' groups, while there is room."""
    from flowfleet.cli.samples.page import Shown

    size, places, groups = 0, set(), {}
    for rank, (sample, note) in enumerate(picked, 1):
        media = media_of(client, job, sample)
        size += len(media or b"")
        places.add(_place(sample))
        groups[sample.step, sample.group] = sample
        yield Shown(sample, media, rank, note)
    steps: dict[int, list[Sample]] = {}
    for (step, group), member in groups.items():
        if step not in steps:
            steps[step] = list(client.samples(job.id, purpose=member.purpose, step=step))
        for sample in steps[step]:
            if sample.group == group and _place(sample) not in places and size < ROOM_BYTES:
                media = media_of(client, job, sample)
                size += len(media or b"")
                yield Shown(sample, media)


def _place(sample: Sample) -> tuple[int, int, int]:
    return sample.step, sample.group, sample.index


def media_of(client: Client, job: Job, sample: Sample) -> bytes | None:
    """The bytes of a picture; None where it is no longer kept."""
    try:
        return client.media(job.id, sample)
    except ApiError as error:
        if error.status == NOT_FOUND:
            return None
        raise
