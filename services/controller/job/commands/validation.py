"""Held-out prompts: sampled without noise from seeds that never change, scored as training samples are."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowfleet.errors import FlowfleetError
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2
from services.controller.job import requests
from services.controller.job.commands.drawing import draw
from services.controller.job.context import JobContext
from services.controller.job.machine.events import Validated
from services.controller.job.reporting.reports import ValidationPart
from services.controller.rewards.failures import RewardPause
from services.controller.rewards.job_rewards import SampleScore
from services.controller.waiting import NotYet

_GROUPS_ONLY = "it scores whole groups, and each held-out prompt has one sample: raise schedule.validation_samples"


@dataclass
class ValidationSamples:
    """Some held-out samples at one version, ordered by prompt and index, and their scores once rewards gave them."""

    samples: list[common_pb2.Sample]
    verdicts: list[SampleScore] | None = None


class Validation:
    """Validations of one job. Remembers what was sampled and scored of the running one, until all of it is scored: a
    reward that fails for some does not make the others be sampled, scored or recorded again."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._drawn: dict[tuple[int, int], ValidationSamples] = {}
        """(version, first prompt) → what was sampled there."""

    async def run(self, version: int) -> Validated:
        """Validates the version on all held-out prompts and reports it."""
        chunks = [self._chunk(version, *chunk) for chunk in _chunks(self._job)]
        ended = await asyncio.gather(*chunks, return_exceptions=True)
        failures = [one for one in ended if isinstance(one, BaseException)]
        if failures:  # raised when all have ended: what is scored is kept for the next try
            raise next((one for one in failures if isinstance(one, RewardPause)), failures[0])
        parts = [one for one in ended if not isinstance(one, BaseException)]
        validated = await self._job.reports.validated(version, parts)
        self._drawn.clear()
        return validated

    async def _chunk(self, version: int, start: int, prompts: Sequence[Prompt]) -> ValidationPart:
        """Samples and scores held-out prompts of one source, from number `start` on, on one replica that serves the
        version."""
        job = self._job
        if (version, start) not in self._drawn:
            self._drawn[version, start] = ValidationSamples(await _draw(job, version, start, prompts))
        drawn = self._drawn[version, start]
        try:
            if drawn.verdicts is None:
                repeated = [prompt for prompt in prompts for _ in range(job.spec.schedule.validation_samples)]
                verdicts = await _score(job, version, drawn.samples, repeated)
                await job.reports.scored(drawn.samples, repeated, verdicts)
                drawn.verdicts = verdicts
            media = [await job.blobs.get(sample.media) for sample in drawn.samples]
        except FlowfleetError:  # of the blob store, where they may have been for too long
            del self._drawn[version, start]
            raise
        return ValidationPart(drawn.samples, drawn.verdicts, media, prompts[0].origin)


def _chunks(job: JobContext) -> Iterator[tuple[int, Sequence[Prompt]]]:
    """Held-out prompts as they are sampled together, with the number of the first."""
    start = 0
    for source in job.held_out:
        of_source = iter(source)
        while some := tuple(itertools.islice(of_source, job.spec.held_out_per_request)):
            for _, of_size in itertools.groupby(some, key=lambda prompt: prompt.size):
                prompts = tuple(of_size)
                yield start, prompts
                start += len(prompts)


async def _score(
    job: JobContext, version: int, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt]
) -> list[SampleScore]:
    """Scores with all rewards where each prompt has a group of samples. A lone sample is scored by the rewards that can
    do that; if none of them counts there is no total."""
    rewards = job.spec.data.scoring(prompts[0].origin, job.machine.rewards_at(version))
    is_alone = job.spec.schedule.validation_samples == 1
    grouped = await job.scoring.rewards.group_rewards(rewards) if is_alone else []
    for name in grouped:
        told = {"reward": name, "reason": _GROUPS_ONLY}
        await job.store.events.append(job.job_id, "not_validated", told, once=f"not-validated-{name}")
    alone = {name: part for name, part in rewards.items() if name not in grouped}
    if grouped and not any(part.has_influence for part in alone.values()):
        return [SampleScore(None, "needs_group")] * len(samples)
    return await job.scoring.score(samples, prompts, alone, version)


async def _draw(job: JobContext, version: int, start: int, prompts: Sequence[Prompt]) -> list[common_pb2.Sample]:
    """Draws all samples of the prompts, in the order of prompt and index."""
    expected = len(prompts) * job.spec.schedule.validation_samples
    request = requests.validate(job, version, start, prompts)
    samples = await draw(job, request, prompts, version, version)
    if len(samples) != expected:
        raise NotYet(f"validation got {len(samples)} of {expected} samples")
    return samples
