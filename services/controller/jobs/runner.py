"""Runs one job to its end, across faults and restarts of the controller. Which jobs run is not decided here, but by the
scheduler (scheduler.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.data.blobs import BlobStore, open_blobs
from flowfleet.errors import Conflict, NotFound, OtherFormat, Unavailable
from flowfleet.job.fingerprints import change, inputs_of
from flowfleet.job.spec import JobSpec
from flowfleet.local.stack import RELOADED
from flowfleet.process.telemetry import JobMetrics
from flowfleet.proto import rollout_pb2
from flowfleet.redis.trouble import trouble
from services.controller.concurrency import Changes
from services.controller.fleet.directory import Directory
from services.controller.fleet.pool import RolloutPool
from services.controller.fleet.watch import FleetWatch
from services.controller.job.context import JobContext, JobCore, forget_gradients
from services.controller.job.driver import JobDriver
from services.controller.job.machine.ledger import Ledger, RolledBack
from services.controller.job.machine.state_machine import Machine
from services.controller.job.reporting.reports import Reports
from services.controller.job.shadow_queue import ShadowMetrics, ShadowQueue
from services.controller.job.trainer.client import JobTrainer
from services.controller.jobs.quarantine import Quarantine
from services.controller.jobs.queue import WEIGHTS
from services.controller.jobs.returned import Returned
from services.controller.jobs.submission.opening import JobData, Unopened, opened
from services.controller.platforms.launcher import FencedLauncher, stop_for_good
from services.controller.prompts.data import Deal
from services.controller.prompts.inputs import Inputs
from services.controller.prompts.mixture import Mixture
from services.controller.prompts.sources import Sources, Unread
from services.controller.retention.folders import JOBS
from services.controller.retention.memory import Memory
from services.controller.rewards.files import changed_file
from services.controller.rewards.gradients import GradientRewards
from services.controller.rewards.job_rewards import JobRewards, modality_of
from services.controller.rewards.metrics import RewardCalls
from services.controller.rewards.scoring import Scoring
from services.controller.settings import ControllerSettings
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.store.pictures import Pictures
from services.controller.store.records import NO_PLACE, JobRecord
from services.controller.store.sample_refs import SampleRefs
from services.controller.store.store import Store
from services.controller.waiting import NoPlace

log = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0
MAX_CRASHES = 20
STEADY_S = 600.0
"""A driver that ran for so long was well: crashes before it do not count any more."""


@dataclass(frozen=True)
class Shared:
    """Parts of a controller that all of its jobs use."""

    settings: ControllerSettings
    redis: Redis
    registry: CollectorRegistry
    lease: Lease
    store: Store
    launcher: FencedLauncher
    directory: Directory
    fleet: FleetWatch
    sources: Sources
    memory: Memory
    quarantine: Quarantine
    metrics: JobMetrics
    reward_calls: RewardCalls
    shadow_metrics: ShadowMetrics


class JobRunner:
    """Runs jobs, each by its own task. `records`: the last known record of each job."""

    def __init__(self, shared: Shared, records: Mapping[str, JobRecord], returned: Returned) -> None:
        self._shared, self._records, self._returned = shared, records, returned
        self.drivers: dict[str, JobDriver] = {}
        """Drivers by job, while they run."""

    async def run(self, job_id: str) -> None:
        """Runs one job to its end. After an error of ours, logs it and continues the job from its ledger, a limited
        number of times in a row. Retries unreadable data as often, then pauses the job. Waits for unreachable peers."""
        self._shared.quarantine.drive(job_id)
        crash, unopened = 0, False
        while crash < MAX_CRASHES:
            began = time.monotonic()
            try:
                now = await self._shared.store.jobs.get(job_id)
                known = self._records.get(job_id, now)
                fresh = {"status": now.status, "desired": now.desired, "started_at": now.started_at}
                record = known.model_copy(update=fresh)
                if not unopened or record.desired is not Desired.PAUSED:  # else its user has yet to resume it
                    if not record.status.terminal:
                        await self._drive(record)
                        self._returned.end(job_id)
                    return
            except LeaseLost:
                raise
            except NotFound as error:
                log.error("job is missing in Redis: %s", error, extra={"job": job_id})
                return
            except NoPlace as error:
                await self._return(job_id, str(error))
                return
            except RolledBack as error:
                log.error(
                    "Redis lost writes; the job resumes from the writes that remain: %s", error, extra={"job": job_id}
                )
                self._shared.fleet.look_again()
            except RedisError as error:
                log.warning("job waits: %s", trouble(error) or error, extra={"job": job_id})
                await self._shared.lease.until_writable()
            except Unavailable as error:
                log.warning("job waits: %s", error, extra={"job": job_id})
            except OtherFormat as error:
                if await self.waits_for_its_version(record, str(error)):
                    return
            except (Unread, Unopened) as error:
                crash, reason = crash + 1, str(error)
                log.warning("could not read the job's data (%d): %s", crash, error, extra={"job": job_id})
                if isinstance(error, Unopened) or crash >= MAX_CRASHES:
                    crash, unopened = 0, True
                    if await self._waits_for_its_user(record, reason):
                        return
            except ValueError as error:
                await self._fail(job_id, str(error))
                return
            except Exception as error:
                crash = 1 if time.monotonic() - began > STEADY_S else crash + 1
                log.exception("job driver crashed (%d)", crash, extra={"job": job_id})
                reason = f"controller error: {type(error).__name__}: {error}"
            await asyncio.sleep(RESTART_DELAY_S)
        await self._fail(job_id, reason)

    async def waits_for_its_version(self, record: JobRecord, reason: str) -> bool:
        """Says why the job does not run here; True once it is cancelled."""
        cancelled = record.desired is Desired.CANCELLED
        if cancelled or reason != record.reason:
            status = JobStatus.CANCELLED if cancelled else record.status
            await self._shared.store.jobs.set_status(record.id, status, reason)
        if cancelled:
            await forget_gradients(self.folder(record.id))
        return cancelled

    async def _waits_for_its_user(self, record: JobRecord, reason: str) -> bool:
        """Pauses the job until its user resumes it; True once it is cancelled."""
        if record.desired is Desired.CANCELLED:
            await stop_for_good(self._shared.launcher, record.id)
            return await self.waits_for_its_version(record, reason)
        told = f"{reason}; then `flowfleet resume` the job"
        await self._shared.store.jobs.set_status(record.id, JobStatus.PAUSED, told, hold=True)
        return False

    async def _drive(self, record: JobRecord) -> None:
        with ExitStack() as stack:
            async with self._shared.quarantine.opening(record.id):
                data = await opened(record, self._shared.sources, self._shared.store, self._shared.settings.limits)
                stack.callback(data.close)
                ledger = Ledger(self._shared.redis, self._shared.lease, record.id)
                machine = await ledger.restore(data.spec)
                known = await self._shared.store.jobs.first_inputs(record.id, data.fingerprints)
            began = replace(data, fingerprints=known)
            runner = JobDriver(ledger, machine, lambda *parts: self._context(record, began, *parts))
            self.drivers[record.id] = runner
            try:
                if changed := change(known, data.fingerprints, inputs_of(data.spec)):
                    await runner.hold(changed)
                status = await runner.run()
                log.info("job ended as %s", status, extra={"job": record.id})
            finally:
                del self.drivers[record.id]
                self._shared.fleet.verified(record.id, None)
                await runner.job.close()

    def _context(self, record: JobRecord, data: JobData, machine: Machine, emit: Any, changes: Changes) -> JobContext:
        spec = machine.spec
        directory = self.folder(record.id)
        directory.mkdir(parents=True, exist_ok=True)
        blobs = open_blobs(self._shared.redis, self._shared.settings.blobs, self._shared.registry)
        deal = Deal(data.training, Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step))
        share = rollout_pb2.Share(
            owner=record.owner,
            weight=WEIGHTS[spec.priority] / WEIGHTS["normal"],
            alone=spec.trainer.deterministic,
            rows=spec.rollout.batch_size,
        )
        pool = RolloutPool(self._shared.fleet, record.id, spec, share=share, shortage=self._shared.directory.shortage)
        scoring = self._scoring(record.id, spec, blobs)
        core = JobCore(record.id, machine, self._shared.store, pool, scoring, directory)
        return JobContext(
            **vars(core),
            emit=emit,
            changes=changes,
            submitted=record.job_spec(),
            fingerprints=data.fingerprints,
            redis=self._shared.redis,
            blobs=blobs,
            refs=SampleRefs(self._shared.redis, blobs, record.id),
            inputs=Inputs(record.id, blobs, self._shared.sources),
            deal=deal,
            held_out=data.held_out,
            trainer=JobTrainer(self._shared.launcher, record.id, spec, GradientRewards(self._shared.directory, spec)),
            reports=Reports(core, self._shared.metrics, ShadowQueue(core, self._shared.shadow_metrics)),
            memory=self._shared.memory,
            pictures=Pictures(self._shared.store, blobs, record.id, spec.schedule.keep_pictures),
        )

    def _scoring(self, job_id: str, spec: JobSpec, blobs: BlobStore) -> Scoring:
        job_rewards = JobRewards(
            self._shared.directory,
            spec.timeouts.score_s,
            modality_of(spec, self._shared.sources),
            self._shared.reward_calls,
            partial(
                changed_file,
                partial(self._shared.store.rewards.file, job_id),
                self._shared.settings.state_dir / RELOADED,
            ),
            patience_s=spec.timeouts.rewards_s,
            pending_s=spec.timeouts.pending_s,
        )
        return Scoring(job_rewards, blobs)

    async def _return(self, job_id: str, reason: str) -> None:
        """Puts a job whose trainer found no place back into the queue, and lets others of its pool go ahead."""
        await self._shared.launcher.leave(job_id)
        delay_s = self._returned.add(job_id, time.monotonic())
        told = f"{NO_PLACE} {reason}; tried again within {delay_s:.0f} s, or when another job ends"
        log.warning("job returns to the queue: %s", told, extra={"job": job_id})
        await self._record(job_id, JobStatus.QUEUED, told)

    async def _fail(self, job_id: str, reason: str) -> None:
        await stop_for_good(self._shared.launcher, job_id)
        await self._record(job_id, JobStatus.FAILED, reason)
        await forget_gradients(self.folder(job_id))

    async def _record(self, job_id: str, status: JobStatus, reason: str) -> None:
        try:
            await self._shared.store.jobs.set_status(job_id, status, reason)
        except (Conflict, NotFound, RedisError) as error:
            log.error("could not record the job as %s: %s", status, error, extra={"job": job_id})

    def folder(self, job_id: str) -> Path:
        return self._shared.settings.state_dir.resolve() / JOBS / job_id
