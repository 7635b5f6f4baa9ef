"""Opens a job for its driver: fetches what it reads before its first step."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from flowfleet.api.jobs import JobStatus
from flowfleet.errors import Full
from flowfleet.job.fingerprints import fingerprints
from flowfleet.job.model_files import exported_folder
from flowfleet.job.spec import JobSpec
from flowfleet.prompts.prompt import Prompt
from services.controller.jobs.submission.data_checks import prompt_problems
from services.controller.jobs.submission.model_checks import family_at
from services.controller.limits import Limits
from services.controller.prompts.conditions import ConditionShapes
from services.controller.prompts.sources import Missing, Sources, Unread
from services.controller.reading.packed import Prompts
from services.controller.reading.places import NotAllowed, is_remote
from services.controller.store.records import JobRecord
from services.controller.store.store import Store


@dataclass(frozen=True)
class JobData:
    """Data that a job reads before its first step."""

    spec: JobSpec
    """The job with folders in place of `job:ID`."""
    training: list[Sequence[Prompt]]
    """Prompts of each source."""
    held_out: list[Sequence[Prompt]]
    """Held-out prompts of each source that has some."""
    read: Sequence[Prompts]
    fingerprints: Mapping[str, str]
    """Setting → fingerprint of what it names now."""

    def close(self) -> None:
        for prompts in self.read:
            prompts.close()


class Unopened(Exception):
    """The job's settings or files cannot be read now, for the reason given: somebody must change that."""


async def opened(record: JobRecord, sources: Sources, store: Store, limits: Limits) -> JobData:
    """Opens a stored job. Raises Unopened where it cannot be read any more, or where data that its submit did not read
    have no room, ValueError where it never could be read."""
    try:
        data = await asyncio.to_thread(open_job, record.job_spec(), sources)
    except Unread:
        raise
    except ValueError as error:
        has_begun = record.status is not JobStatus.QUEUED or record.started_at is not None
        if isinstance(error, NotAllowed | Missing) or has_begun:
            raise Unopened(str(error)) from None
        raise
    size = sum(prompts.size_bytes for prompts in data.read)
    if size > record.data_bytes:  # a submit reads nothing remote
        others = [other for other in await store.jobs.unended() if other.id != record.id]
        try:
            limits.check_room(record.job_spec(), others, size)
        except Full as error:
            data.close()
            raise Unopened(str(error)) from None
        await store.jobs.set_data_bytes(record.id, size)
    return data


def open_job(spec: JobSpec, sources: Sources) -> JobData:
    """Fetches the job's data, and checks what is remote as a submit checks files. Blocking.

    Raises ValueError for what the job may not read, by the settings of now, or what is wrong with it.
    """
    with ExitStack() as stack:
        read: dict[str, Prompts] = {}
        shapes = ConditionShapes(sources)
        for setting, url, columns in spec.data_files:
            prompts = read[setting] = stack.enter_context(closing(sources.prompts(url, columns)))
            if is_remote(url):
                family = family_at(spec.model.path, sources)
                if problems := list(prompt_problems(spec, family, shapes, sources, prompts)):
                    raise ValueError("\n".join(f"{setting}: {problem}" for problem in problems))
        training: list[Sequence[Prompt]] = [read.get(source.setting, ()) for source in spec.data.each]
        held_out: list[Sequence[Prompt]] = [read[source.validation_setting] for source in spec.data.held_out]
        placed = _placed(spec, sources)
        digests = {setting: prompts.digest() for setting, prompts in read.items()} | fingerprints(placed)
        data = JobData(placed, training, held_out, list(read.values()), digests)
        stack.pop_all()
    return data


def _placed(spec: JobSpec, sources: Sources) -> JobSpec:
    """The job with the folders that it names as the other processes see them. Raises ValueError."""
    path = sources.places.pipeline(spec.model.path)
    adapter = spec.model.adapter
    if adapter is not None:  # a job that has begun resumes from its own checkpoint; the trainer misses it otherwise
        folder = sources.places.model(adapter, may_be_gone=True)
        adapter = str(exported_folder(folder) if spec.is_evaluation else folder)
    teachers = {
        name: part.model_copy(update={"adapter": str(sources.places.model(part.adapter, may_be_gone=True))})
        for name, part in spec.teachers.items()
    }
    resume = spec.trainer.resume
    if resume is not None:
        resume = str(sources.places.checkpoint(resume, may_be_gone=True))
    model = spec.model.model_copy(update={"path": str(path), "adapter": adapter})
    algorithm = spec.algorithm.model_copy(update={"teachers": teachers} if teachers else {})
    trainer = spec.trainer.model_copy(update={"resume": resume})
    return spec.model_copy(update={"model": model, "algorithm": algorithm, "trainer": trainer})
