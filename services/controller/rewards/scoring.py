"""A job's samples at its rewards: fetches their pictures, and bounds how many are there at once."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from flowfleet.data.blobs import BlobStore
from flowfleet.data.samples import sample_name
from flowfleet.job.spec import RewardPart
from flowfleet.process import traces
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2
from flowfleet.rewards.requests import EncodedSample
from services.controller.concurrency import Budget
from services.controller.rewards.answers import Answer
from services.controller.rewards.job_rewards import JobRewards, SampleScore

MAX_SCORING = 128
"""Samples at the rewards at once: enough for 16 processes of one, and a reward of one picture a second answers the
last of them well before `timeouts.score_s`."""


class Scoring:
    def __init__(self, rewards: JobRewards, blobs: BlobStore) -> None:
        self.rewards, self._blobs = rewards, blobs
        self._budget = Budget(MAX_SCORING)

    async def score(
        self,
        samples: Sequence[common_pb2.Sample],
        prompts: Sequence[Prompt],
        rewards: Mapping[str, RewardPart],
        step: int,
    ) -> list[SampleScore]:
        """Asks every reward, as `JobRewards.score`, and fetches the pictures when one is asked. One verdict a sample,
        in order. Waits its turn: no more than `MAX_SCORING` run at once, so that a call's deadline is not spent
        behind the rest of its step."""
        traces.link(samples)
        async with self._budget.take(len(samples)):
            digests = {sample_name(sample.id): sample.media.sha256 for sample in samples}
            fetch = partial(self._fetch, samples, prompts)
            verdicts = await self.rewards.score(rewards, step, digests, fetch)
        return [verdicts[sample_id] for sample_id in digests]

    async def ask(
        self, name: str, part: RewardPart, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt]
    ) -> list[Answer | None]:
        """Asks one reward alone for its answers to samples, in order. Raises RewardFailure when it fails as a whole."""
        answers = await self.rewards.ask(name, part, await self._fetch(samples, prompts))
        return [answers.get(sample_name(sample.id)) for sample in samples]

    async def _fetch(self, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt]) -> list[EncodedSample]:
        """Fetches samples as rewards get them, in order."""
        media = await asyncio.gather(*(self._blobs.get(sample.media) for sample in samples))
        return [
            EncodedSample(
                sample_id=sample_name(sample.id),
                media=data,
                media_type=sample.media_type,
                prompt=prompt.text,
                metadata=prompt.metadata,
                group_id=f"{sample.id.step}/{sample.id.group}",
            )
            for sample, data, prompt in zip(samples, media, prompts, strict=True)
        ]
