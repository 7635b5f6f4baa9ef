"""Checks of a job's prompts and of the media that they name."""

import itertools
from collections.abc import Iterable, Iterator

from flowfleet.job.spec import JobSpec
from flowfleet.models.registry import ModelFamily
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of
from flowfleet.prompts.hub import is_dataset
from flowfleet.prompts.prompt import PICTURES, VIDEOS, Prompt, media_type
from services.controller.jobs.submission.model_checks import pixel_multiple
from services.controller.prompts.conditions import ConditionShapes
from services.controller.prompts.sources import Sources
from services.controller.reading.packed import Prompts
from services.controller.reading.places import NotAllowed, is_remote

MAX_LINES = 20
"""Lines of a data set that are named, of those that are wrong."""


def read_prompts(sources: Sources, url: str, columns: Columns) -> Prompts | None:
    """Prompts of a file on this machine; None of what is remote, which is fetched when the job opens. Devices and
    endless files are not opened. Raises OSError and ValueError."""
    if is_remote(url):
        sources.places.check(url)
        if not is_dataset(url):
            format_of(url, columns)
        return None
    if not sources.places.exists(url):
        raise ValueError(f"there is no file {url!r}; give an absolute path or URL that the controller can read")
    return sources.prompts(url, columns)


def prompt_problems(
    spec: JobSpec, family: ModelFamily | None, shapes: ConditionShapes, sources: Sources, prompts: Prompts
) -> Iterable[str]:
    """Names the first problems of a data set's prompts."""
    multiple = pixel_multiple(spec, family, sources) if family and spec.data.size_column else 1
    told = prompts.telling(MAX_LINES)
    lines = (_line_problems(spec, family, shapes, sources, multiple, prompt) for prompt in told)
    return itertools.islice(itertools.chain.from_iterable(lines), MAX_LINES)


def _line_problems(
    spec: JobSpec, family: ModelFamily | None, shapes: ConditionShapes, sources: Sources, multiple: int, prompt: Prompt
) -> Iterator[str]:
    media = (*prompt.images, *prompt.media)
    if prompt.negative is not None and not spec.rollout.guidance.is_on:
        yield (
            f"{prompt.source}: its negative_prompt has no effect with rollout.guidance_scale = 1: raise that, or leave "
            'the column out by data.ignore_columns = ["negative_prompt"]'
        )
    if problem := _size_problem(spec, multiple, prompt):
        yield f"{prompt.source}: the column {spec.data.size_column!r} {problem}"
    if refused := [str(error) for medium in media if (error := _refusal(sources, medium))]:
        yield from (f"{prompt.source}: {problem}" for problem in refused)
        return
    is_question = family is not None and family.takes_media and spec.writes_tokens
    if family is not None and not is_question and (wish := _images_wanted(spec, family, len(prompt.images))):
        yield f"{prompt.source}: {family.title} {wish}"
    elif not is_question and (problem := shapes.problem(prompt)):
        yield f"{prompt.source}: {problem}"
    for medium in media:
        problem = "" if is_question else _type_problem(spec, medium, is_condition=medium in prompt.images)
        if problem or not (is_remote(medium) or sources.places.is_file(medium)):
            yield f"{prompt.source}: {problem or f'there is no file {medium}'}"


def _size_problem(spec: JobSpec, multiple: int, prompt: Prompt) -> str:
    """Says what is wrong with a line's own size; empty if nothing is."""
    if prompt.size is None:
        return ""
    (width, height), largest = prompt.size, spec.rollout.size
    if width % multiple or height % multiple:
        return f"holds {width}x{height}, and this checkpoint draws multiples of {multiple} pixels"
    if width * height > largest.width * largest.height:
        most = f"{largest.width}x{largest.height}"
        return f"holds {width}x{height}: give no more pixels than {most}, or raise rollout.width and rollout.height"
    return ""


def _images_wanted(spec: JobSpec, family: ModelFamily, number: int) -> str:
    """Says what to change about a line's number of condition images; empty if the family takes them."""
    if number > family.takes_images > 0:
        return f"takes at most {family.takes_images} images a prompt: leave out the others"
    if number > family.takes_images:
        return 'takes no images: leave out "images"'
    if number == 0 and family.takes_images and (not family.images_optional or spec.rollout.from_image):
        return 'needs condition images: add "images"'
    if number and family.holds_first_frame and not spec.rollout.from_image:
        return 'makes videos from text alone: leave out "images", or set rollout.from_image = true'
    return ""


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
