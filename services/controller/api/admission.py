"""What only the controller can know about a job: whether its files are there, what its model can do, and its rewards.
Asked at submit."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowfleet import hub
from flowfleet.job.adapter_files import CHECKPOINT_FILE, find_adapter
from flowfleet.job.model_files import exported_folder
from flowfleet.job.rules import sequences
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.media.files import MediaLimits
from flowfleet.models.registry import FAMILIES, ModelFamily, family_of
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of
from flowfleet.prompts.hub import is_dataset
from flowfleet.prompts.prompt import PICTURES, VIDEOS, Prompt, media_type
from services.controller.api.problems import InvalidJob
from services.controller.fleet.directory import Directory
from services.controller.limits import Limits
from services.controller.prompts.conditions import ConditionShapes
from services.controller.prompts.sources import Sources
from services.controller.reading.places import NotAllowed, is_remote
from services.controller.rewards.trials import refusals
from services.controller.trainers.launcher import device_problem

_READING = threading.Semaphore(2)
"""Submits whose data are in memory at once."""
MAX_LINES = 20
"""Lines of a data set that are named, of those that are wrong."""


def parse(data: dict[str, Any]) -> JobSpec:
    """Raises InvalidJob, one message a setting."""
    try:
        return parse_job(data)
    except ValueError as error:
        raise InvalidJob(str(error).split("\n")) from None


async def check(
    spec: JobSpec, directory: Directory, sources: Sources, limits: Limits, trainer_devices: Sequence[str] = ()
) -> JobSpec:
    """The job, a Hub name of its model at its commit.

    Raises InvalidJob when the job asks for more samples than the operator admits, a file is missing, unreadable or
    not one that jobs may read, the model cannot do what is asked, a reward service or the rollout pool is not one of
    the fleet's, the trainer wants more accelerators than it has, or a reward refuses its params. Of what is
    remote only the configurations of a Hub model are fetched here: `open_job` does the rest."""
    spec = await asyncio.to_thread(_pinned, spec, sources)
    problems = [*_fleet_problems(spec, directory)]
    problems += filter(None, [limits.problem(spec), device_problem(spec, trainer_devices)])
    problems += await asyncio.to_thread(_all_file_problems, spec, sources)
    problems = problems or await refusals(spec, spec.rewards, directory, sources)
    if problems:
        raise InvalidJob(problems)
    return spec


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
            yield f"{setting}: this controller has no such reward service; it has: {known}"
    pools = directory.pools
    if pools is not None and spec.rollout.pool in spec.pools and spec.rollout.pool not in pools:
        known = ", ".join(sorted(pools)) or "none"
        yield f"rollout.pool = {spec.rollout.pool!r}: this fleet has no such pool; it has: {known}"


@dataclass(frozen=True)
class JobData:
    """What a job reads before its first step."""

    spec: JobSpec
    """The job with folders in place of `job:ID`."""
    training: list[list[Prompt]]
    """Prompts of each source."""
    held_out: list[Prompt]


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
            family = _family(spec.model.path, sources)
            lines = itertools.chain.from_iterable(
                _line_problems(spec, family, shapes, sources, prompt) for prompt in prompts
            )
            if problems := list(itertools.islice(lines, MAX_LINES)):
                raise ValueError("\n".join(f"{setting}: {problem}" for problem in problems))
    adapter = spec.model.adapter
    if adapter is not None:  # a job that has begun resumes from its own checkpoint; the trainer misses it otherwise
        folder = sources.places.model(adapter, may_be_gone=True)
        adapter = str(exported_folder(folder) if spec.is_evaluation else folder)
    teachers = {
        name: part.model_copy(update={"adapter": str(sources.places.model(part.adapter, may_be_gone=True))})
        for name, part in spec.algorithm.teachers.items()
    }
    resume = spec.trainer.resume
    if resume is not None:
        resume = str(sources.places.checkpoint(resume, may_be_gone=True))
    model = spec.model.model_copy(update={"path": str(path), "adapter": adapter})
    algorithm = spec.algorithm.model_copy(update={"teachers": teachers})
    trainer = spec.trainer.model_copy(update={"resume": resume})
    training = [read.get(source.setting, []) for source in spec.data.each]
    held_out = [prompt for source in spec.data.held_out for prompt in read[source.validation_setting]]
    return JobData(
        spec.model_copy(update={"model": model, "algorithm": algorithm, "trainer": trainer}), training, held_out
    )


def _all_file_problems(spec: JobSpec, sources: Sources) -> list[str]:
    with _READING:
        return list(_file_problems(spec, sources))


def _file_problems(spec: JobSpec, sources: Sources) -> Iterator[str]:
    family = None
    try:
        family = _family(spec.model.path, sources)
    except ValueError as error:
        yield f"model.path: {error}"
    else:
        yield from _family_problems(spec, family)
        yield from _size_problems(spec, family, sources)
    yield from _limit_problems(spec)
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
    shapes = ConditionShapes(sources)
    for setting, url, columns in spec.data_files:
        yield from (f"{setting}: {problem}" for problem in _data_problems(spec, family, shapes, sources, url, columns))


def _adapters(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Setting and place of each adapter that the job starts or learns from."""
    if spec.model.adapter is not None:
        yield "model.adapter", spec.model.adapter
    for name, teacher in spec.algorithm.teachers.items():
        yield f"algorithm.teachers.{name}.adapter", teacher.adapter


# -- the model -------------------------------------------------------------------------------------------------------


def _pinned(spec: JobSpec, sources: Sources) -> JobSpec:
    """The job with the commit of its model and its configurations at hand, so that all services load the same files."""
    if hub.name_of(spec.model.path) is None:
        return spec
    try:
        path = hub.pin(str(sources.places.pipeline(spec.model.path)))
        hub.configurations(path)
    except ValueError as error:
        raise InvalidJob([f"model.path: {error}"]) from None
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": path})})


def _family(path: str, sources: Sources) -> ModelFamily:
    folder = hub.configurations(sources.places.pipeline(path))
    if not any(_is_readable(folder / name) for name in ("model_index.json", "config.json")):
        raise ValueError(
            f"{path!r} holds no readable model_index.json or config.json; give the directory of a diffusers pipeline, "
            "or of a transformers model that writes text, as an absolute path that controller, rollouts and trainer "
            "all see"
        )
    return family_of(folder)


def _is_readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # a name that no file can have
        return False


def _family_problems(spec: JobSpec, family: ModelFamily) -> Iterator[str]:
    rollout = spec.rollout
    if kind := sequences.refusal(family, spec.loss.kind):
        yield f"algorithm.loss = {spec.loss.name}: {kind}"
    if rollout.num_frames > 1 and family.modality == "image":
        videos = ", ".join(known.title for known in FAMILIES.values() if known.modality == "video") or "none yet"
        yield (
            f"rollout.num_frames = {rollout.num_frames}: {family.title} makes pictures; set it to 1, or choose a video "
            f"model: {videos}"
        )
    if rollout.embedded_guidance is not None and not family.embedded_guidance:
        yield f"rollout.embedded_guidance has no effect on {family.title}: leave it out, or use rollout.guidance_scale"
    for name in ("image_guidance_scale", "guidance_renorm"):
        if getattr(rollout, name) is not None and not family.branch_guidance:
            yield f"rollout.{name} has no effect on {family.title}: leave it out, or use rollout.guidance_scale"
    tokens, most = spec.model.max_sequence_length, family.max_sequence_length
    if tokens is not None and most is None:
        yield f"model.max_sequence_length has no effect on {family.title}, which cuts no prompts: leave it out"
    elif tokens is not None and most is not None and tokens > most:
        yield f"model.max_sequence_length = {tokens}: {family.title} takes at most {most} tokens"
    if rollout.condition_pixels is not None and not family.takes_images:
        yield f"rollout.condition_pixels has no effect on {family.title}, which takes no images: leave it out"


def _size_problems(spec: JobSpec, family: ModelFamily, sources: Sources) -> Iterator[str]:
    """Sizes that the family's adapter would refuse."""
    frames, step = spec.rollout.num_frames, family.frame_multiple
    if family.modality == "video" and (frames - 1) % step:
        less = frames - (frames - 1) % step
        yield (
            f"rollout.num_frames = {frames}: {family.title} makes 1 more than a multiple of {step} frames; set it to "
            f"{less} or {less + step}"
        )
    multiple = _pixel_multiple(hub.configurations(sources.places.pipeline(spec.model.path)), family)
    rollout, schedule = spec.rollout, spec.schedule
    sides = {
        "rollout.height": rollout.height,
        "rollout.width": rollout.width,
        "schedule.validation_height": schedule.validation_height,
        "schedule.validation_width": schedule.validation_width,
    }
    for setting, pixels in sides.items():
        if pixels is not None and pixels % multiple:
            yield f"{setting} = {pixels}: this {family.title} checkpoint draws multiples of {multiple} pixels"


def _pixel_multiple(path: Path, family: ModelFamily) -> int:
    """1 where the checkpoint does not say."""
    if family.vae_multiple is None:
        return 1
    try:
        config = json.loads((path / "vae" / "config.json").read_text(encoding="utf-8"))
        return max(1, int(config["scale_factor_spatial"]) * family.vae_multiple)
    except (OSError, ValueError, KeyError, TypeError):  # the adapter will say what is wrong with the VAE
        return 1


def _limit_problems(spec: JobSpec) -> Iterator[str]:
    """Samples that every reward would refuse unread."""
    if not spec.rewards:
        return
    limits, rollout, shown = MediaLimits(), spec.rollout, spec.validation_size
    if excess := limits.excess(rollout.width, rollout.height, rollout.num_frames):
        yield f"rollout: samples of {excess} by rewards; lower rollout.num_frames, height or width"
    elif excess := limits.excess(shown.width, shown.height, shown.num_frames):
        yield f"schedule: held-out samples of {excess} by rewards; lower schedule.validation_height or _width"


# -- the data --------------------------------------------------------------------------------------------------------


def _data_problems(
    spec: JobSpec, family: ModelFamily | None, shapes: ConditionShapes, sources: Sources, url: str, columns: Columns
) -> Iterator[str]:
    """Devices and endless files are not opened, and nothing is fetched."""
    try:
        if is_remote(url):
            sources.places.check(url)
            if not is_dataset(url):
                format_of(url, columns)
        elif not sources.places.exists(url):
            yield f"there is no file {url!r}; give an absolute path or URL that the controller can read"
        else:
            prompts = sources.prompts(url, columns)
            lines = itertools.chain.from_iterable(
                _line_problems(spec, family, shapes, sources, prompt) for prompt in prompts
            )
            yield from itertools.islice(lines, MAX_LINES)
    except (OSError, ValueError) as error:
        yield str(error)


def _line_problems(
    spec: JobSpec, family: ModelFamily | None, shapes: ConditionShapes, sources: Sources, prompt: Prompt
) -> Iterator[str]:
    media = (*prompt.images, *prompt.media)
    if prompt.negative is not None and not spec.rollout.guidance.is_on:
        yield (
            f"{prompt.source}: its negative_prompt has no effect with rollout.guidance_scale = 1: raise that, or leave "
            'the column out by data.ignore_columns = ["negative_prompt"]'
        )
    if refused := [str(error) for medium in media if (error := _refusal(sources, medium))]:
        yield from (f"{prompt.source}: {problem}" for problem in refused)
        return
    is_question = family is not None and family.takes_media and spec.writes_tokens
    if family is not None and not is_question and bool(prompt.images) != family.takes_images:
        wish = 'needs condition images: add "images"' if family.takes_images else 'takes no images: leave out "images"'
        yield f"{prompt.source}: {family.title} {wish}"
    elif not is_question and prompt.images and (problem := shapes.problem(prompt)):
        yield f"{prompt.source}: {problem}"
    for medium in media:
        problem = "" if is_question else _type_problem(spec, medium, is_condition=medium in prompt.images)
        if problem or not (is_remote(medium) or sources.places.is_file(medium)):
            yield f"{prompt.source}: {problem or f'there is no file {medium}'}"


def _type_problem(spec: JobSpec, medium: str, *, is_condition: bool) -> str:
    num_frames = spec.rollout.num_frames
    if is_condition or num_frames == 1:
        return "" if media_type(medium) in PICTURES.values() else f"{medium} is no picture: give {', '.join(PICTURES)}"
    if media_type(medium) in VIDEOS.values():
        return ""
    return f"{medium} is no video, and rollout.num_frames = {num_frames}: give {', '.join(VIDEOS)}"


def _refusal(sources: Sources, medium: str) -> NotAllowed | None:
    """Why a job may not read a file or URL. What lies elsewhere is looked for when it is needed."""
    try:
        sources.places.check(medium)
    except NotAllowed as error:
        return error
    return None
