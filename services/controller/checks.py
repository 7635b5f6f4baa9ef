"""What only the controller can know about a job: whether its files are there, and its rewards. Asked at submit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from flowfleet.jobs import JobSpec, parse_job
from services.controller.data import load_prompts
from services.controller.problems import InvalidJob

MAX_PROMPT_BYTES = 1 << 30


def parse(data: dict[str, Any]) -> JobSpec:
    """Raises InvalidJob, one message a setting."""
    try:
        return parse_job(data)
    except ValueError as error:
        raise InvalidJob(str(error).split("\n")) from None


async def check(spec: JobSpec, rewards: Mapping[str, str]) -> None:
    """Raises InvalidJob when a file is missing or unreadable, or a reward service is not one of the controller's."""
    problems = [*_reward_problems(spec, rewards), *await asyncio.to_thread(lambda: list(_file_problems(spec)))]
    if problems:
        raise InvalidJob(problems)


def _reward_problems(spec: JobSpec, rewards: Iterable[str]) -> Iterator[str]:
    known = ", ".join(sorted(rewards)) or "none"
    for name in spec.rewards:
        if name not in rewards:
            yield f"rewards.{name}: this controller has no such reward service; it has: {known}"


def _file_problems(spec: JobSpec) -> Iterator[str]:
    yield from _model_problems(spec.model.path)
    for name, url in (("train", spec.data.train), ("validation", spec.data.validation)):
        if url is not None:
            yield from (f"data.{name}: {problem}" for problem in _prompt_problems(url))


def _model_problems(path: str) -> Iterator[str]:
    index = Path(path) / "model_index.json"
    try:
        readable = index.is_file() and os.access(index, os.R_OK)
    except (OSError, ValueError):  # a name that no file can have
        readable = False
    if not readable:
        yield (
            f"model.path: {path!r} holds no readable model_index.json; give the directory of a diffusers pipeline, "
            "as an absolute path that controller, rollouts and trainer all see"
        )


def _prompt_problems(url: str) -> Iterator[str]:
    """Devices and endless files are not opened."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        if not filesystem.isfile(path):
            yield f"there is no file {url!r}; give an absolute path or URL that the controller can read"
        elif (size := filesystem.size(path)) > MAX_PROMPT_BYTES:
            yield f"{url!r} has {size} bytes; a prompt file has at most {MAX_PROMPT_BYTES}"
        else:
            load_prompts(url)
    except (OSError, ValueError, ImportError) as error:
        yield str(error)
