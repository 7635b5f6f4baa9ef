"""Opens a job for its driver: fetches what it reads before its first step."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowfleet.job.fingerprints import fingerprints
from flowfleet.job.model_files import exported_folder
from flowfleet.job.spec import JobSpec
from flowfleet.prompts.prompt import Prompt
from services.controller.jobs.submission.data_checks import MAX_LINES, line_problems
from services.controller.jobs.submission.model_checks import family_at
from services.controller.prompts.conditions import ConditionShapes
from services.controller.prompts.sources import Sources
from services.controller.reading.places import is_remote


@dataclass(frozen=True)
class JobData:
    """Data that a job reads before its first step."""

    spec: JobSpec
    """The job with folders in place of `job:ID`."""
    training: list[list[Prompt]]
    """Prompts of each source."""
    held_out: list[Prompt]
    fingerprints: Mapping[str, str]
    """Setting → fingerprint of what it names now."""


def open_job(spec: JobSpec, sources: Sources) -> JobData:
    """Fetches the job's data, and checks what is remote as a submit checks files. Blocking.

    Raises ValueError for what the job may not read, by the settings of now, or what is wrong with it.
    """
    path = sources.places.pipeline(spec.model.path)
    shapes = ConditionShapes(sources)
    read: dict[str, list[Prompt]] = {}
    for setting, url, columns in spec.data_files:
        prompts = read[setting] = sources.prompts(url, columns)
        if is_remote(url):
            family = family_at(spec.model.path, sources)
            lines = itertools.chain.from_iterable(
                line_problems(spec, family, shapes, sources, prompt) for prompt in prompts
            )
            if problems := list(itertools.islice(lines, MAX_LINES)):
                raise ValueError("\n".join(f"{setting}: {problem}" for problem in problems))
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
    training = [read.get(source.setting, []) for source in spec.data.each]
    held_out = [prompt for source in spec.data.held_out for prompt in read[source.validation_setting]]
    placed = spec.model_copy(update={"model": model, "algorithm": algorithm, "trainer": trainer})
    digests = {setting: _digest(prompts) for setting, prompts in read.items()}
    return JobData(placed, training, held_out, {**digests, **fingerprints(placed)})


def _digest(prompts: Iterable[Prompt]) -> str:
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(repr(prompt).encode("utf-8", "surrogatepass"))
    return found.hexdigest()
