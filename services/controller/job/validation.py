"""Held-out prompts: sampled without noise from seeds that never change, scored as training samples are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from flowfleet.errors import FlowfleetError
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2
from services.controller.job import reports, requests
from services.controller.job.context import JobContext, ValidationSamples
from services.controller.rewards.failures import RewardPause
from services.controller.rewards.plane import SampleScore
from services.controller.waiting import NotYet


@dataclass(frozen=True)
class ValidationPart:
    """Some held-out prompts at one version, in prompt order."""

    samples: list[common_pb2.Sample]
    verdicts: list[SampleScore]
    media: list[bytes]


async def validated(job: JobContext, version: int) -> float | None:
    """Validates the version on all held-out prompts and reports it. The mean reward; none where none has a score."""
    size = job.spec.rollout.batch_size
    chunks = [_validate_chunk(job, version, start, size) for start in range(0, len(job.held_out), size)]
    ended = await asyncio.gather(*chunks, return_exceptions=True)
    failures = [one for one in ended if isinstance(one, BaseException)]
    if failures:  # raised when all have ended: what is scored is kept for the next try
        raise next((one for one in failures if isinstance(one, RewardPause)), failures[0])
    parts = [one for one in ended if not isinstance(one, BaseException)]
    reward: float | None = await job.reports.validated(version, parts)
    job.drawn.clear()
    return reward


async def _validate_chunk(job: JobContext, version: int, start: int, size: int) -> ValidationPart:
    """Samples and scores the held-out prompts start … start + size − 1 on one replica that serves the version. What was
    sampled is kept until the whole validation has its scores, and so is what was scored: a reward that fails for some
    does not make the others be sampled, scored or recorded again."""
    prompts = job.held_out[start : start + size]
    if (version, start) not in job.drawn:
        job.drawn[version, start] = ValidationSamples(await _draw(job, version, start, prompts))
    drawn = job.drawn[version, start]
    try:
        if drawn.verdicts is None:
            verdicts = await _score(job, version, drawn.samples, prompts)
            await reports.put_samples(job, drawn.samples, prompts, verdicts)
            drawn.verdicts = verdicts
        media = [await job.blobs.get(sample.media) for sample in drawn.samples]
    except FlowfleetError:  # of the blob store, where they may have been for too long
        del job.drawn[version, start]
        raise
    return ValidationPart(drawn.samples, drawn.verdicts, media)


async def _score(
    job: JobContext, version: int, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt]
) -> list[SampleScore]:
    """Scores with the rewards that can score a sample alone; if none of them counts there is no total."""
    rewards = job.machine.rewards_at(version)
    grouped = await job.rewards.group_rewards(rewards)
    for name in grouped:
        told = {"reward": name, "reason": "it scores whole groups, and each held-out prompt has one sample"}
        await job.store.append_event(job.job_id, "not_validated", told, once=f"not-validated-{name}")
    alone = {name: part for name, part in rewards.items() if name not in grouped}
    if grouped and not any(part.has_influence for part in alone.values()):
        return [SampleScore(None, "needs_group")] * len(samples)
    return await job.score(samples, prompts, alone, version)


async def _draw(job: JobContext, version: int, start: int, prompts: Sequence[Prompt]) -> list[common_pb2.Sample]:
    """One sample a prompt, in order."""
    request = requests.validate(job, version, start, prompts)
    async with job.replica(version, version, len(prompts), evaluated=request.evaluated) as replica:
        request.weights_digest = replica.digest
        await job.inputs.attach(request, prompts)
        call = job.fleet.stub(replica.address).Generate(request, timeout=job.spec.timeouts.generate_s)
        samples = sorted([event.sample async for event in call], key=lambda sample: sample.id.group)
    if len(samples) != len(prompts):
        raise NotYet(f"validation got {len(samples)} of {len(prompts)} samples")
    return samples
