"""Archives of ended jobs, below any fsspec URL: written by the controller, read here.

URL/JOB/job.json             the job as the REST API showed it
URL/JOB/events.jsonl         metrics.jsonl, samples.jsonl, checkpoints.jsonl, rewards.jsonl, votes.jsonl: a line each
URL/JOB/media/PURPOSE/STEP-GROUP-INDEX.EXT   pictures and videos that were still kept
URL/JOB/complete.json        written last, with the number of lines and media: without it the archive is not whole

archive = Archive("s3://bucket/flowfleet")
for job in archive.jobs():
    print(job.id, job.name, len(list(archive.metrics(job.id))))
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import fsspec

from flowfleet.api.answers import Answer, read
from flowfleet.api.jobs import Checkpoint, Job, JobEvent, MetricsRow
from flowfleet.api.rewards import RewardRevision
from flowfleet.api.samples import EXTENSIONS, Sample
from flowfleet.errors import NotFound

COMPLETE: Final = "complete.json"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")

T = TypeVar("T", bound=Answer)


class Archive:
    """Ended jobs below a URL. Raises NotFound for a job that has no complete archive there."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.url)

    # -- reading -------------------------------------------------------------------------------------------------

    def jobs(self) -> Iterator[Job]:
        """Jobs with a complete archive, newest first."""
        found = self._fs.glob(f"{self._root.rstrip('/')}/*/{COMPLETE}")
        for name in sorted((path.split("/")[-2] for path in found), reverse=True):
            yield self.job(name)

    def job(self, job_id: str) -> Job:
        self._check(job_id)
        return read(Job, self._read(job_id, "job.json"))

    def events(self, job_id: str) -> Iterator[JobEvent]:
        return self._lines(job_id, "events", JobEvent)

    def metrics(self, job_id: str) -> Iterator[MetricsRow]:
        """Yields the metrics, a row per step, ascending."""
        return self._lines(job_id, "metrics", MetricsRow)

    def checkpoints(self, job_id: str) -> Iterator[Checkpoint]:
        return self._lines(job_id, "checkpoints", Checkpoint)

    def rewards(self, job_id: str) -> Iterator[RewardRevision]:
        """Revisions that took effect after the submit."""
        return self._lines(job_id, "rewards", RewardRevision)

    def samples(self, job_id: str) -> Iterator[Sample]:
        """Samples of training, then of validation, each from the oldest."""
        return self._lines(job_id, "samples", Sample)

    def media(self, job_id: str, sample: Sample) -> bytes:
        """The encoded picture or video of a sample. Raises NotFound when it was no longer kept."""
        self._check(job_id)
        return self._read(
            job_id, media_name(sample.purpose, sample.step, sample.group, sample.index, sample.media_type)
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def folder(self, job_id: str) -> str:
        """URL of a job's archive."""
        return f"{self.url}/{job_id}"

    def write(self, job_id: str, name: str, data: bytes) -> None:
        path = self._path(job_id, name)
        if "file" in self._fs.protocol or self._fs.protocol == "file":  # object stores have no folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data)

    def complete(self, job_id: str, counts: Mapping[str, int]) -> None:
        """Marks the archive as whole."""
        self.write(job_id, COMPLETE, json.dumps({"format": 1, **counts}).encode())

    # -- files ---------------------------------------------------------------------------------------------------

    def _check(self, job_id: str) -> None:
        if not self._fs.exists(self._path(job_id, COMPLETE)):
            raise NotFound(f"{self.url} has no complete archive of job {job_id}")

    def _lines(self, job_id: str, kind: str, model: type[T]) -> Iterator[T]:
        self._check(job_id)
        for line in self._read(job_id, f"{kind}.jsonl").splitlines():
            yield read(model, line)

    def _read(self, job_id: str, name: str) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._path(job_id, name))
        except FileNotFoundError:
            raise NotFound(f"the archive of job {job_id} has no {name}") from None
        return data

    def _path(self, job_id: str, name: str) -> str:
        if not _NAME.fullmatch(job_id) or job_id.startswith("."):
            raise NotFound(f"{job_id!r} is not the id of a job")
        return f"{self._root.rstrip('/')}/{job_id}/{name}"


def media_name(purpose: str, step: int, group: int, index: int, media_type: str) -> str:
    """File of a sample's picture or video inside a job's archive."""
    kind = purpose if purpose in ("train", "validate") else "other"
    return f"media/{kind}/{step}-{group}-{index}.{EXTENSIONS.get(media_type, 'bin')}"
