"""Context of one job's commands: its spec and machine, its Redis keys, and its ways to the other services."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowfleet.data.blobs import BlobStore
from flowfleet.job.model_files import GRADIENTS
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, trainer_pb2
from flowfleet.redis import keys
from services.controller.concurrency import Changes
from services.controller.fleet.pool import RolloutPool
from services.controller.job.machine import events as ev
from services.controller.job.machine.ledger import RolledBack
from services.controller.job.machine.state_machine import Machine
from services.controller.job.mending import Mending
from services.controller.job.trainer.client import JobTrainer
from services.controller.prompts.data import Deal
from services.controller.prompts.inputs import Inputs
from services.controller.retention.memory import Memory
from services.controller.rewards.scoring import Scoring
from services.controller.store.pictures import Pictures
from services.controller.store.sample_refs import ALL_STEPS, SampleRefs
from services.controller.store.store import Store
from services.controller.waiting import Check

if TYPE_CHECKING:
    from services.controller.job.reporting.reports import Reports

Emit = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class JobCore:
    """Core that everything about one running job starts from."""

    job_id: str
    machine: Machine
    store: Store
    pool: RolloutPool
    scoring: Scoring
    directory: Path
    """Folder of what the job leaves on disk."""

    @property
    def spec(self) -> JobSpec:
        return self.machine.spec


@dataclass(frozen=True)
class JobContext(JobCore):
    """Context of the job's commands. `emit` makes events durable and folds them, then notifies `changes`."""

    emit: Emit
    changes: Changes
    fingerprints: Mapping[str, str]
    """Setting → fingerprint of what it named when the job began."""
    submitted: JobSpec
    """The job as its user wrote it; `spec` has folders in place of `job:ID`."""
    redis: Any  # redis.asyncio.Redis, whose hints do not know that replies are bytes here
    blobs: BlobStore
    refs: SampleRefs
    inputs: Inputs
    deal: Deal
    """Order of the training prompts."""
    held_out: Sequence[Sequence[Prompt]]
    """Held-out prompts of each source."""
    trainer: JobTrainer
    reports: Reports
    memory: Memory
    pictures: Pictures
    mending: Mending = field(default_factory=Mending)

    async def close(self) -> None:
        await self.reports.close()
        await asyncio.gather(self.scoring.rewards.close(), self.trainer.close(), self.mending.close())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the machine's state to fulfill a condition."""
        await self.changes.until(condition)

    async def pause(self, reason: str, until: Check | None = None) -> None:
        """Pauses the job until `until` returns True, or else until the user resumes it; commands that are still wanted
        then start again."""
        self.mending.wait_for(until)
        hold = None if until else partial(self.store.jobs.hold, self.job_id)
        await self.emit(ev.PauseRequested(reason=reason), also=hold)

    def rewards(self, prompt: Prompt, step: int) -> Mapping[str, RewardPart]:
        """Rewards that score training samples of a prompt, as its source weighs them."""
        return self.spec.data.scoring(prompt.origin, self.machine.training_rewards_at(step))

    def prompts(self, step: int) -> Sequence[Prompt]:
        """Returns the prompts of a step, one per group."""
        return self.deal.of_step(step)

    async def samples(self, step: int, group: int, status: str) -> list[common_pb2.Sample]:
        """References of the group's samples of a status, ascending by index."""
        batch = self.machine.state.batches[step].groups[group]
        return await self.refs.get(step, [(group, i) for i, sample in sorted(batch.items()) if sample.status == status])

    async def load_train_request(self, step: int) -> trainer_pb2.TrainStepRequest:
        """Raises RolledBack: it is kept until a checkpoint covers it, and a trainer begins where it is stored."""
        found = await self.refs.request(step)
        if found is None:
            raise RolledBack(f"the stored request of step {step} is missing")
        return found

    async def forget(self) -> None:
        """Frees what only a running job needs."""
        await self.refs.release_before(ALL_STEPS)
        await self.redis.delete(keys.trajectories(self.job_id), keys.adapter(self.job_id))
        await self.inputs.forget()
        await forget_gradients(self.directory)


async def forget_gradients(directory: Path) -> None:
    """Deletes what an ended job kept for steps that might be applied again."""
    await asyncio.to_thread(shutil.rmtree, directory / "checkpoints" / GRADIENTS, ignore_errors=True)
