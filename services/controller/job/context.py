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
from flowfleet.proto import common_pb2, trainer_pb2, trainer_pb2_grpc
from flowfleet.redis import keys
from flowfleet.rewards.requests import EncodedSample
from flowfleet.rpc.endpoint import open_channel
from services.controller.concurrency import Budget, Changes
from services.controller.fleet.replicas import Replica
from services.controller.fleet.watch import FleetWatch, NobodyThere, Want
from services.controller.job.ledger import RolledBack
from services.controller.job.state_machine import Machine
from services.controller.prompts.data import Deal, Prompt
from services.controller.prompts.inputs import Inputs
from services.controller.retention.memory import Memory
from services.controller.rewards.plane import RewardPlane, SampleScore
from services.controller.store.jobs import JobStore
from services.controller.trainers.launcher import Launcher
from services.controller.waiting import NotYet, WaitedInVain

MAX_SCORING = 128
"""Samples at the rewards at once: enough for 16 processes of one, and a reward of one picture a second answers the
last of them well before `timeouts.score_s`."""

SLICE = 256
"""Samples that are handled in one go: the event loop serves others in between."""

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
    """Of the training prompts."""
    held_out: list[Prompt]
    trainer_address: str = ""
    drawn: dict[tuple[int, int], ValidationSamples] = field(default_factory=dict)
    """Of the validation that runs: (version, first prompt) → what was sampled there."""
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
        """Waits for the machine's state to fulfil a condition."""
        await self.changes.until(condition)

    def prompts(self, step: int) -> Sequence[Prompt]:
        """One a group."""
        return self.deal.of_step(step)

    # -- references of samples -----------------------------------------------------------------------------------

    def samples_key(self, step: int) -> str:
        return keys.job_key(self.job_id, "refs", step)

    async def samples(self, step: int, group: int, status: str) -> list[common_pb2.Sample]:
        """References of the group's samples of a status, ascending by index."""
        batch = self.machine.state.batches[step].groups[group]
        names = [sample_field(group, index) for index, sample in sorted(batch.items()) if sample.status == status]
        values = await self.redis.hmget(self.samples_key(step), names) if names else []
        return [common_pb2.Sample.FromString(value) for value in values]

    async def score(
        self,
        samples: Sequence[common_pb2.Sample],
        prompts: Sequence[Prompt],
        rewards: Mapping[str, RewardPart],
        step: int,
    ) -> list[SampleScore]:
        """Asks every reward, as `RewardPlane.score`, and fetches the pictures when one is asked. One verdict a sample,
        in order. Waits its turn: no more than `MAX_SCORING` are away at once, so that a call's deadline is not spent
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

    # -- requests of training steps, kept until a checkpoint covers them -----------------------------------------

    def train_key(self, step: int) -> str:
        return keys.job_key(self.job_id, "train", step)

    async def store_train_request(self, request: trainer_pb2.TrainStepRequest, pipe: Any) -> None:
        """Adds it to a transaction."""
        pipe.set(self.train_key(request.step), request.SerializeToString())

    async def has_train_request(self, step: int) -> bool:
        return bool(await self.redis.exists(self.train_key(step)))

    async def find_train_request(self, step: int) -> trainer_pb2.TrainStepRequest | None:
        stored = await self.redis.get(self.train_key(step))
        return None if stored is None else trainer_pb2.TrainStepRequest.FromString(stored)

    async def load_train_request(self, step: int) -> trainer_pb2.TrainStepRequest:
        """Raises RolledBack: it is kept until a checkpoint covers it, and a trainer begins where it is stored."""
        found = await self.find_train_request(step)
        if found is None:
            raise RolledBack(f"the stored request of step {step} is gone")
        return found

    async def release_before(self, version: int) -> None:
        """Frees what only the steps below a checkpointed version needed; pictures stay for their TTL."""
        async for step in self._held_steps():
            if step < version:
                async for refs in self._refs(step, *self._of_step):
                    await self.blobs.delete(refs)
                await self.redis.unlink(self.samples_key(step), self.train_key(step))

    async def renew(self, ttl_s: int) -> None:
        """Prolongs the blobs that may still be trained on."""
        async for step in self._held_steps():
            async for refs in self._refs(step, "trajectory", "prompt_embeds", "negative_embeds"):
                await self.blobs.renew(refs, ttl_s)

    async def forget(self) -> None:
        """Frees what only a running job needs."""
        await self.release_before(self.spec.schedule.steps + 1)
        await self.redis.delete(keys.trajectories(self.job_id))
        await self.inputs.forget()

    @property
    def _of_step(self) -> tuple[str, ...]:
        """What goes with its step. The negative embeds are the whole job's, but where condition images are in them."""
        return ("trajectory", "prompt_embeds", *(("negative_embeds",) if self.deal.has_images else ()))

    async def _held_steps(self) -> Any:
        async for key in self.redis.scan_iter(match=keys.job_key(self.job_id, "refs") + ":*", count=1000):
            yield int(key.decode().rpartition(":")[2])

    async def _refs(self, step: int, *names: str) -> AsyncIterator[list[common_pb2.BlobRef]]:
        """References of those names of a step's samples, in slices; several samples may share one."""
        cursor = -1
        while cursor:
            cursor, values = await self.redis.hscan(self.samples_key(step), max(cursor, 0), count=SLICE)
            samples = [common_pb2.Sample.FromString(value) for value in values.values()]
            refs = [getattr(sample, name) for sample in samples for name in names]
            yield list({ref.uri: ref for ref in refs if ref.uri}.values())


def sample_field(group: int, index: int) -> str:
    """Field of a sample in its step's hash of references."""
    return f"{group}/{index}"


def sample_name(sample: common_pb2.SampleId) -> str:
    """job/step/group/index, as logs and reward services see it."""
    return f"{sample.job_id}/{sample.step}/{sample.group}/{sample.index}"
