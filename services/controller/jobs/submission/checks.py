"""Checks a job at submit against what only the controller knows: the files that exist, what its model can do, and its
rewards."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowfleet.job.adapter_files import CHECKPOINT_FILE, find_adapter
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.prompts.prompt import Prompt
from services.controller.fleet.directory import Directory
from services.controller.jobs.submission.data_checks import prompt_problems, read_prompts
from services.controller.jobs.submission.model_checks import (
    checkpoint_problems,
    family_at,
    family_problems,
    limit_problems,
    pinned,
    storage_problems,
    weight_problems,
)
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.limits import Limits
from services.controller.platforms.kubernetes.template import choice_problem
from services.controller.platforms.local.launcher import device_problem
from services.controller.prompts.conditions import ConditionShapes
from services.controller.prompts.sources import Sources
from services.controller.rewards.trials import refusals

_READING = threading.Semaphore(2)
"""Submits whose data are read at once."""


@dataclass
class _Seen:
    """Collects what a check saw of a job's data."""

    firsts: dict[str, Prompt] = field(default_factory=dict)
    """First prompt of each file that was read, by its setting."""
    data_bytes: int = 0


def parse(data: dict[str, Any]) -> JobSpec:
    """Raises InvalidJob, one message a setting."""
    try:
        return parse_job(data)
    except ValueError as error:
        raise InvalidJob(str(error).split("\n")) from None


async def check(
    spec: JobSpec,
    directory: Directory,
    sources: Sources,
    limits: Limits,
    trainer_devices: Sequence[str] = (),
    room: int = 0,
    trainer_template: Path | None = None,
) -> tuple[JobSpec, int]:
    """The job, a Hub name of its model at its commit, and the bytes of its data as far as they are read here. `room`:
    bytes that its blobs may take; 0 is not a limit.

    Raises InvalidJob when the job asks for more samples than the operator admits or Redis holds, a file is missing,
    unreadable or not one that jobs may read, the model cannot do what is asked, a reward service or the rollout pool is
    not one of the fleet's, the trainer wants more accelerators than it has, or a reward refuses its params. Of what is
    remote only the configurations of a Hub model are fetched here: `open_job` does the rest."""
    spec = await asyncio.to_thread(pinned, spec, sources)
    problems = [*_fleet_problems(spec, directory)]
    problems += filter(None, [limits.problem(spec)])
    if spec.trainer.launcher == "controller":
        problems += filter(None, [device_problem(spec, trainer_devices), choice_problem(spec, trainer_template)])
    seen = _Seen()
    problems += await asyncio.to_thread(_all_file_problems, spec, sources, seen, room)
    problems = problems or await refusals(spec, spec.rewards, directory, sources, seen.firsts)
    if problems:
        raise InvalidJob(problems)
    return spec, seen.data_bytes


def check_extension(spec: JobSpec, steps: int) -> None:
    """Raises InvalidJob when more steps would be trained at a learning rate that has come to its end, or by a job that
    only evaluates."""
    if spec.is_evaluation:
        raise InvalidJob([f"schedule.steps = {steps}: this job evaluates and has no data to train on; submit another"])
    schedule = spec.trainer.optimizer.lr_schedule
    if schedule != "constant" and steps > spec.schedule.steps:
        raise InvalidJob(
            [
                f"schedule.steps = {steps}: the job's learning rate falls until step {spec.schedule.steps} "
                f'(trainer.optimizer.lr_schedule = "{schedule}"); finish it, and continue it as a new job with '
                f"`flowfleet submit --from ID --set schedule.steps={steps}`"
            ]
        )


def _fleet_problems(spec: JobSpec, directory: Directory) -> Iterator[str]:
    """Problems with names that it does not know. A reward or pool may have no replicas yet: the job waits for them."""
    known = ", ".join(sorted(directory.rewards)) or "none"
    for name, part in spec.rewards.items():
        if (service := part.service_of(name)) not in directory.rewards:
            setting = f"rewards.{name}" + (f".service = {service!r}" if part.service else "")
            yield (
                f"{setting}: this controller has no such reward service; it has: {known}; add one by `flowfleet up "
                f"--reward {service}=FILE.py:FUNCTION`, the controller's --reward, or the chart's rewards"
            )
    pools = directory.pools
    if pools is not None and spec.rollout.pool in spec.pools and spec.rollout.pool not in pools:
        known = ", ".join(sorted(pools)) or "none"
        yield f"rollout.pool = {spec.rollout.pool!r}: this fleet has no such pool; it has: {known}"


def _all_file_problems(spec: JobSpec, sources: Sources, seen: _Seen, room: int) -> list[str]:
    with _READING:
        return list(_file_problems(spec, sources, seen, room))


def _file_problems(spec: JobSpec, sources: Sources, seen: _Seen, room: int) -> Iterator[str]:
    """Problems with what the job names. Notes what it reads in `seen`."""
    family = None
    try:
        family = family_at(spec.model.path, sources)
    except ValueError as error:
        yield f"model.path: {error}"
    else:
        yield from family_problems(spec, family)
        yield from checkpoint_problems(spec, family, sources)
        yield from weight_problems(spec, family, sources)
    yield from limit_problems(spec)
    for setting, adapter in _adapters(spec):
        try:
            find_adapter(sources.places.model(adapter))
        except (OSError, ValueError) as error:
            yield f"{setting}: {error}"
    if spec.trainer.resume is not None:
        try:
            if not (sources.places.checkpoint(spec.trainer.resume) / CHECKPOINT_FILE).is_file():
                yield f"trainer.resume = {spec.trainer.resume!r} is not a checkpoint: name one as job:ID@STEP"
        except (OSError, ValueError) as error:
            yield f"trainer.resume: {error}"
    shapes, held_out = ConditionShapes(sources), 0
    for setting, url, columns in spec.data_files:
        try:
            if (read := read_prompts(sources, url, columns)) is None:
                continue
            with closing(read) as prompts:
                found = prompt_problems(spec, family, shapes, sources, prompts)
                yield from (f"{setting}: {problem}" for problem in found)
                seen.firsts[setting] = prompts[0]
                seen.data_bytes += prompts.size_bytes
                held_out += len(prompts) if setting.endswith("validation") else 0
        except (OSError, ValueError) as error:
            yield f"{setting}: {error}"
    if family is not None and room:
        yield from storage_problems(spec, sources, held_out, room)


def _adapters(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Setting and place of each adapter that the job starts or learns from."""
    if spec.model.adapter is not None:
        yield "model.adapter", spec.model.adapter
    for name, teacher in spec.teachers.items():
        yield f"algorithm.teachers.{name}.adapter", teacher.adapter
