"""Tries a reward's params in one small call before steps depend on it: a service says only when it scores what is wrong
with them."""

import asyncio
from collections.abc import Mapping

import numpy as np
from prometheus_client import CollectorRegistry

from flowfleet.job.data import Source
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.media.files import Frames, encode_media
from flowfleet.media.sound import SOUND_RATE, Sound
from flowfleet.media.text import TEXT_TYPE
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import reward_pb2
from flowfleet.rewards.requests import EncodedSample
from services.controller.fleet.directory import Directory
from services.controller.prompts.sources import Sources
from services.controller.reading.places import is_remote
from services.controller.rewards.client import RewardService
from services.controller.rewards.failures import RewardFailure
from services.controller.rewards.gradients import trains_on
from services.controller.rewards.job_rewards import modality_of
from services.controller.rewards.metrics import RewardCalls

TRIAL_S = 10.0
"""Limit on a whole trial. A service that needs longer counts as not having rejected anything."""
SIDE = 64
NUM_FRAMES = 5
"""Number of frames of a video."""


async def refusals(
    spec: JobSpec,
    rewards: Mapping[str, RewardPart],
    directory: Directory,
    sources: Sources,
    firsts: Mapping[str, Prompt] | None = None,
) -> list[str]:
    """Returns what services say of calls that they will never take, one line per reward. Errors of single samples do
    not count, nor does a service that is unreachable or slow. `firsts`: setting → first prompt of its file, of files
    that were read just now; else they are read here."""
    if not rewards:
        return []
    modality = await asyncio.to_thread(modality_of, spec, sources)
    prompts = await asyncio.to_thread(_prompts, spec, rewards, sources, firsts)
    found = await asyncio.gather(
        *(_refusal(spec, name, part, directory, prompts[name], modality) for name, part in rewards.items())
    )
    return [problem for problem in found if problem]


async def _refusal(
    spec: JobSpec,
    name: str,
    part: RewardPart,
    directory: Directory,
    prompt: Prompt,
    modality: reward_pb2.Modality.ValueType,
) -> str:
    service = RewardService(part.service_of(name), directory, TRIAL_S, RewardCalls(CollectorRegistry()))
    try:
        async with asyncio.timeout(TRIAL_S):
            await service.check(name, modality, needs_gradient=trains_on(spec, name, part))
            count = spec.rollout.group_size if service.needs_group else 1
            samples = await asyncio.to_thread(_samples, prompt, count, modality)
            await service.ask(name, part.params, samples, modality)
    except RewardFailure as failure:
        return str(failure) if failure.permanent else ""
    except TimeoutError:
        return ""
    finally:
        await service.close()
    return ""


def _prompts(
    spec: JobSpec, rewards: Mapping[str, RewardPart], sources: Sources, firsts: Mapping[str, Prompt] | None
) -> dict[str, Prompt]:
    """Reward → the first prompt that it scores."""
    each = spec.data.each
    known = {
        source.name: _first(spec, source, sources) if firsts is None else firsts.get(source.setting, Prompt(""))
        for source in each
    }
    of_rewards = [(name, known[source.name]) for source in each for name in spec.data.scoring(source.name, rewards)]
    return {name: Prompt("") for name in rewards} | dict(reversed(of_rewards))


def _first(spec: JobSpec, source: Source, sources: Sources) -> Prompt:
    """The first prompt of a source; an empty one where its file is gone by now, or would have to be fetched."""
    if is_remote(source.path):
        return Prompt("")
    try:
        return sources.first_prompt(source.path, source.of_kind(spec.method.data))
    except ValueError:
        return Prompt("")


def _samples(prompt: Prompt, count: int, modality: reward_pb2.Modality.ValueType) -> list[EncodedSample]:
    """A group of drawn pictures or videos, or of written answers, each another."""
    media = [_medium(index, modality) for index in range(count)]
    return [
        EncodedSample(*medium, prompt.text, prompt.metadata, group_id="trial", sample_id=f"trial/{index}")
        for index, medium in enumerate(media)
    ]


def _medium(index: int, modality: reward_pb2.Modality.ValueType) -> tuple[bytes, str]:
    if modality == reward_pb2.MODALITY_TEXT:
        return f"The answer is {index}.".encode(), TEXT_TYPE
    if modality == reward_pb2.MODALITY_IMAGE:
        return encode_media(_drawn(index, 1))
    tone = np.sin(np.arange(SOUND_RATE // 4)[None] / (index + 4)) / (index + 2)
    sound = Sound(tone.astype(np.float32), SOUND_RATE) if modality == reward_pb2.MODALITY_SOUND else None
    return encode_media(_drawn(index, NUM_FRAMES), sound=sound)


def _drawn(index: int, num_frames: int) -> Frames:
    """A ramp of gray over a color, which moves."""
    ramp = np.arange(SIDE)[None, :, None] * 2 + np.arange(SIDE)[:, None, None]
    color = np.array([37, 91, 173]) * (index + 1)
    frames = [np.broadcast_to((ramp + color + 8 * time) % 256, (SIDE, SIDE, 3)) for time in range(num_frames)]
    return np.stack(frames).astype(np.uint8)
