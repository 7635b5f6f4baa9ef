"""What the commands of one job work with: its spec and machine, its Redis keys, and its ways to the other services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from flowfleet.data.blobs import BlobStore
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, trainer_pb2, trainer_pb2_grpc
from flowfleet.redis import keys
from flowfleet.rewards.requests import EncodedSample
from flowfleet.rpc.endpoint import open_channel
from services.controller.concurrency import Budget, Changes
from services.controller.fleet.replicas import Replica
from services.controller.fleet.watch import FleetWatch, NobodyThere, Want
from services.controller.job.ledger import RolledBack
from services.controller.job.state_machine import Machine
from services.controller.prompts.data import Deal
from services.controller.prompts.inputs import Inputs
from services.controller.retention.memory import Memory
from services.controller.rewards.plane import RewardPlane, SampleScore
from services.controller.store.jobs import JobStore
from services.controller.store.sample_refs import ALL_STEPS, SampleRefs
from services.controller.trainers.launcher import Launcher
from services.controller.waiting import NotYet, WaitedInVain

MAX_SCORING = 128
"""Samples at the rewards at once: enough for 16 processes of one, and a reward of one picture a second answers the
last of them well before `timeouts.score_s`."""

Emit = Callable[..., Awaitable[None]]


@dataclass
class ValidationSamples:
    """Some held-out samples at one version, in prompt order, and what the rewards said of them once they did."""

    samples: list[common_pb2.Sample]
    verdicts: list[SampleScore] | None = None


@dataclass
class JobContext:
    """One running job. `emit` makes events durable and folds them; `changed` is notified after each."""

    job_id: str
    spec: JobSpec
    machine: Machine
    emit: Emit
    changes: Changes
    redis: Any  # redis.asyncio.Redis, whose hints do not know that replies are bytes here
    blobs: BlobStore
    refs: SampleRefs
    inputs: Inputs
    store: JobStore
    fleet: FleetWatch
    rewards: RewardPlane
    launcher: Launcher
    memory: Memory
    shortage: Callable[[str, str], str]
    """Why pods of a component and name cannot run, as `Directory.shortage`."""
    directory: Path
    deal: Deal
    """Order of the training prompts."""
    held_out: list[Prompt]
    trainer_address: str = ""
    drawn: dict[tuple[int, int], ValidationSamples] = field(default_factory=dict)
    """Samples of the running validation: (version, first prompt) → what was sampled there."""
    reports: Any = None  # services.controller.job.reports.Reports, set by its maker
    shadows: Any = None  # services.controller.job.shadow_queue.ShadowQueue, set by its maker
    scoring: Budget = field(default_factory=lambda: Budget(MAX_SCORING))
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    def trainer(self) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
        """The stub of the trainer that `ensure_trainer` found."""
        address = self.trainer_address
        if not address:
            raise NotYet("no trainer yet")
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return trainer_pb2_grpc.TrainerServiceStub(self._channels[address])

    async def drop_trainer(self) -> None:
        """Forgets the trainer. Calls to it that are under way are cancelled."""
        channel = self._channels.pop(self.trainer_address, None)
        self.trainer_address = ""
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        if self.shadows is not None:
            await self.shadows.close()
        await asyncio.gather(self.rewards.close(), *(channel.close(None) for channel in self._channels.values()))

    @asynccontextmanager
    async def replica(self, low: int, high: int, samples: int, *, evaluated: bool = False) -> AsyncIterator[Replica]:
        """Lent from the job's pool, as `FleetWatch.lease`. Raises WaitedInVain while the pool has no live replica."""
        want = Want(low, high, 2 * self.spec.rollout.batch_size, evaluated)
        try:
            async with self.fleet.lease(self.spec.rollout.pool, self.job_id, want, samples) as replica:
                yield replica
        except NobodyThere:
            raise WaitedInVain(self.nobody_there()) from None

    def nobody_there(self) -> str:
        """What to say of a pool without live replicas."""
        pool = self.spec.rollout.pool
        shortage = self.shortage("rollout", pool)
        return f"pool {pool!r} has no live rollout replica" + (f": {shortage}" if shortage else "")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the machine's state to fulfill a condition."""
        await self.changes.until(condition)

    def prompts(self, step: int) -> Sequence[Prompt]:
        """One a group."""
        return self.deal.of_step(step)

    # -- references of samples -----------------------------------------------------------------------------------

    async def samples(self, step: int, group: int, status: str) -> list[common_pb2.Sample]:
        """References of the group's samples of a status, ascending by index."""
        batch = self.machine.state.batches[step].groups[group]
        return await self.refs.get(step, [(group, i) for i, sample in sorted(batch.items()) if sample.status == status])

    async def score(
        self,
        samples: Sequence[common_pb2.Sample],
        prompts: Sequence[Prompt],
        rewards: Mapping[str, RewardPart],
        step: int,
    ) -> list[SampleScore]:
        """Asks every reward, as `RewardPlane.score`, and fetches the pictures when one is asked. One verdict a sample,
        in order. Waits its turn: no more than `MAX_SCORING` run at once, so that a call's deadline is not spent
        behind the rest of its step."""
        async with self.scoring.take(len(samples)):
            digests = {sample_name(sample.id): sample.media.sha256 for sample in samples}
            fetch = partial(self.reward_samples, samples, prompts)
            verdicts = await self.rewards.score(rewards, step, digests, fetch)
        return [verdicts[sample_id] for sample_id in digests]

    async def reward_samples(
        self, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt]
    ) -> list[EncodedSample]:
        """What rewards get of samples, in order; fetches the pictures."""
        media = await asyncio.gather(*(self.blobs.get(sample.media) for sample in samples))
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

    async def load_train_request(self, step: int) -> trainer_pb2.TrainStepRequest:
        """Raises RolledBack: it is kept until a checkpoint covers it, and a trainer begins where it is stored."""
        found = await self.refs.request(step)
        if found is None:
            raise RolledBack(f"the stored request of step {step} is gone")
        return found

    async def forget(self) -> None:
        """Frees what only a running job needs."""
        await self.refs.release_before(ALL_STEPS)
        await self.redis.delete(keys.trajectories(self.job_id))
        await self.inputs.forget()


def sample_name(sample: common_pb2.SampleId) -> str:
    """job/step/group/index, as logs and reward services see it."""
    return f"{sample.job_id}/{sample.step}/{sample.group}/{sample.index}"
