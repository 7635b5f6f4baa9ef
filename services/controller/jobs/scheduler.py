"""Takes up queued jobs, those of one rollout pool one after the other, and keeps the running ones going, across faults
and restarts of the controller. Of several controllers only the one that holds the lease does (leadership.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.client.archive import Archive
from flowfleet.data.blobs import BlobStore, open_blobs
from flowfleet.errors import Conflict, NotFound, OtherFormat, Unavailable
from flowfleet.job.fingerprints import change, inputs_of
from flowfleet.job.spec import JobSpec
from flowfleet.local.stack import RELOADED
from flowfleet.process.telemetry import JobMetrics
from flowfleet.redis.trouble import trouble
from services.controller.concurrency import Changes, Children, end, wait
from services.controller.fleet.directory import Directory
from services.controller.fleet.pool import RolloutPool
from services.controller.fleet.replicas import Replica
from services.controller.fleet.watch import FleetWatch
from services.controller.job.context import JobContext, JobCore, forget_gradients
from services.controller.job.driver import JobDriver
from services.controller.job.machine.ledger import Ledger, RolledBack
from services.controller.job.machine.state_machine import Machine
from services.controller.job.reporting.reports import Reports
from services.controller.job.shadow_queue import ShadowMetrics, ShadowQueue
from services.controller.job.trainer.client import JobTrainer
from services.controller.jobs.quarantine import Quarantine
from services.controller.jobs.returned import Returned
from services.controller.jobs.submission.opening import JobData, Unopened, opened
from services.controller.metrics.monitor import Monitor
from services.controller.platforms.launcher import FencedLauncher, Launcher, stop_for_good
from services.controller.prompts.data import Deal
from services.controller.prompts.inputs import Inputs
from services.controller.prompts.mixture import Mixture
from services.controller.prompts.sources import Unread
from services.controller.retention.folders import JOBS, Folders
from services.controller.retention.keeper import Keeper
from services.controller.retention.memory import Memory
from services.controller.rewards.files import changed_file
from services.controller.rewards.gradients import GradientRewards
from services.controller.rewards.job_rewards import JobRewards, modality_of
from services.controller.rewards.metrics import RewardCalls
from services.controller.rewards.scoring import Scoring
from services.controller.scaling.demand import DemandHash, demand, work_of
from services.controller.settings import ControllerSettings
from services.controller.store.changes import listen, notify
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.store.pictures import Pictures
from services.controller.store.records import NO_PLACE, JobRecord
from services.controller.store.replication import Replication
from services.controller.store.sample_refs import SampleRefs
from services.controller.store.store import Store
from services.controller.waiting import NoPlace

log = logging.getLogger(__name__)

POLL_S = 1.0
LOAD_EVERY_S = 5.0
REST_S = 0.1
"""At least, from look to look: of many jobs one always wakes the runner, as does the demand that it tells itself."""
RESTART_DELAY_S = 1.0
MAX_CRASHES = 20
STEADY_S = 600.0
"""A driver that ran for so long was well: crashes before it do not count any more."""


class JobScheduler:
    """The jobs of this controller: one runs in each rollout pool, the others queue."""

    def __init__(
        self,
        settings: ControllerSettings,
        redis: Redis,
        store: Store,
        registry: CollectorRegistry,
        launcher: Launcher,
        directory: Directory,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._sources = settings.sources
        self._replication = Replication(redis, settings.state_dir, settings.redis_acks, registry)
        self._lease = Lease(redis, registry, self._replication)
        self._store = store.fenced_by(self._lease)
        self._launcher = FencedLauncher(launcher, self._lease)
        self._demand = DemandHash(redis)
        self._directory = directory
        self._fleet = FleetWatch(redis)
        self._registry = registry
        self._metrics = JobMetrics(registry)
        self._reward_calls = RewardCalls(registry)
        self._shadow_metrics = ShadowMetrics(registry)
        self._memory = Memory(redis, settings.keep)
        self._keeper = Keeper(
            self._store,
            open_blobs(redis, settings.blobs, registry),
            settings.keep,
            Archive(settings.archive) if settings.archive else None,
            memory=self._memory,
            registry=registry,
            blobs_in_redis=settings.blobs == "redis",
            uploads=settings.uploads,
            folders=Folders(settings.state_dir, registry),
        )
        self._quarantine = Quarantine(redis, settings.redis_url.get_secret_value())
        self._returned = Returned()
        self._wake = asyncio.Event()
        self._jobs: dict[str, str] = {}
        """Rollout pool → the job that it ran last, or runs."""
        self._records: dict[str, JobRecord] = {}
        """Records of the jobs that have not ended, as of the last check; the submitted job never changes."""
        self._running: dict[str, JobDriver] = {}
        """Drivers by job, while they run."""
        self._monitor = Monitor(registry, redis, self._machines, self.fleet_view, self._store.lists.add_seconds)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._fleet.start()
        await self._quarantine.start()
        self._task = asyncio.create_task(self._run(), name="runner")
        self._task.add_done_callback(_tell_end)

    async def stop(self) -> None:
        """Leaves a running job to the next controller, which may lead when this returns; its trainer lives on."""
        if self._task is not None:
            await end([self._task])
        await self._fleet.stop()
        await self._quarantine.stop()
        self._sources.close()

    async def notify(self) -> None:
        """Something was submitted or asked for."""
        self._wake.set()
        await notify(self._redis)

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done() and self._fleet.alive

    @property
    def leads(self) -> bool:
        return self._lease.held

    @property
    def trouble(self) -> str:
        return self._lease.trouble

    @property
    def loss(self) -> str:
        return self._replication.loss

    def fleet_view(self) -> Sequence[Replica]:
        """The replicas as the controller knows them."""
        return self._fleet.fleet.all()

    def _machines(self) -> dict[str, Machine]:
        return {job_id: runner.machine for job_id, runner in self._running.items()}

    async def _run(self) -> None:
        children = Children()
        children.create_task(listen(self._redis, self._wake.set), name="changes of jobs")
        children.create_task(self._lease.run(self._lead), name="leadership")
        await children.wait()

    async def _lead(self) -> None:
        """Runs the leader's tasks until another controller leads."""
        await self._monitor.start()
        try:
            await self._run_jobs()
        except LeaseLost:
            log.warning("lost leadership; stopping job drivers")
        finally:
            for job_id in self._jobs.values():
                self._metrics.forget(job_id)
            self._jobs.clear()
            self._records.clear()
            await self._monitor.stop()

    async def _run_jobs(self) -> None:
        """Runs the jobs and what goes with them, until one part fails."""
        children = Children()
        children.create_task(self._keeper.run(), name="keeper")
        children.create_task(self._tell_load(), name="load of rewards")
        children.create_task(self._start_jobs(children), name="jobs")
        await children.wait()

    async def _start_jobs(self, children: Children) -> None:
        """Runs one job at a time in each pool, oldest first. Meanwhile waiting jobs follow their users' requests."""
        tasks: dict[str, asyncio.Task[None]] = {}
        while True:
            self._wake.clear()
            with _may_fail():
                active = await self._store.jobs.active()
                if not tasks:
                    await self._end_others(active)
                    await self._quarantine.take_over()
                await self._set_aside(tasks)
                taken = {self._jobs[pool] for pool, task in tasks.items() if not task.done()}
                first = await self._first_of_pools(active, taken)
                for pool, record in first.items():
                    if pool not in tasks or tasks[pool].done():
                        self._take_up(pool, record.id)
                        tasks[pool] = children.create_task(self._run_job(record.id), name=f"job {record.id}")
                        tasks[pool].add_done_callback(lambda _: self._wake.set())
                await self._tell_demand(first.values())
            await wait(self._wake, POLL_S)
            await asyncio.sleep(REST_S)

    async def _tell_load(self) -> None:
        """Keeps what the page shows of the rewards' calls."""
        while True:
            with _may_fail():
                await self._store.rewards.put_load(self._reward_calls.load())
            await asyncio.sleep(LOAD_EVERY_S)

    async def _end_others(self, active: Collection[str]) -> None:
        """Ends trainers of ended jobs. Jobs run even where this fails."""
        try:
            await self._launcher.keep_only(active)
        except (LeaseLost, RedisError):
            raise
        except Exception as error:
            log.warning("could not end trainers of ended jobs: %s: %s", type(error).__name__, error)

    async def _tell_demand(self, first: Iterable[JobRecord]) -> None:
        """How many replicas the first jobs of the pools need now. Those whose trainers wait for a place need none."""
        works = []
        for record in first:
            if self._launcher.placed(record.id):
                self._returned.placed(record.id)
            if not self._returned.has_place(record.id):
                continue
            runner = self._running.get(record.id)
            state = () if runner is None else (runner.machine, sum(map(len, runner.job.held_out)))
            works.append(work_of(record, *state))
        in_flight = Counter[str]()
        for replica in self._fleet.fleet.all():
            in_flight[replica.pool] += replica.outstanding
        await self._demand.write(self._lease, demand(filter(None, works), in_flight))

    def _take_up(self, pool: str, job_id: str) -> None:
        """Metrics of an ended job stay until the next one of its pool begins: Prometheus reads the last."""
        if (before := self._jobs.get(pool)) is not None:
            self._metrics.forget(before)
        self._jobs[pool] = job_id

    async def _first_of_pools(self, active: list[str], taken: Collection[str]) -> dict[str, JobRecord]:
        """Rollout pool → its job that is `taken` up, else the oldest that has not ended and need not wait. Ends the
        queued jobs that were cancelled."""
        first: dict[str, JobRecord] = {}
        known, self._records = self._records, {}
        for job_id, (status, desired) in zip(active, await self._store.jobs.statuses(active), strict=True):
            record = known.get(job_id) or await self._readable(job_id)
            self._records[job_id] = record = record.model_copy(update={"status": status, "desired": desired})
            unwanted = record.status is JobStatus.QUEUED and record.desired is Desired.CANCELLED
            if unwanted and job_id not in taken:
                await self._store.jobs.set_status(job_id, JobStatus.CANCELLED, "cancelled in the queue")
                await forget_gradients(self._folder(job_id))
            elif record.is_unreadable:
                if record.desired is Desired.CANCELLED:
                    await self._waits_for_its_version(record, record.reason)
            elif job_id in taken:
                first[record.pool] = record
            elif self._returned.waits(job_id, time.monotonic()):
                continue
            elif record.status is not JobStatus.QUARANTINED or await self._is_back(record):
                first.setdefault(record.pool, record)
        return first

    async def _readable(self, job_id: str) -> JobRecord:
        """The job's record, validated once. One that this release cannot read has that reason, and no trainer: it waits
        for another release, and others of its pool go ahead."""
        record = await self._store.jobs.get(job_id)
        try:
            record.job_spec()
            reason = "" if record.is_unreadable else record.reason
        except OtherFormat as error:
            reason = str(error)
            await stop_for_good(self._launcher, job_id)
        if reason != record.reason:
            await self._store.jobs.set_status(job_id, record.status, reason)
        return record.model_copy(update={"reason": reason})

    async def _set_aside(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Quarantines jobs that stopped the controller too often."""
        for job_id in self._quarantine.suspects():
            if reason := await self._quarantine.reason(job_id):
                await end([tasks[pool] for pool, driven in self._jobs.items() if driven == job_id and pool in tasks])
                await stop_for_good(self._launcher, job_id)
                await self._store.jobs.set_status(job_id, JobStatus.QUARANTINED, reason)

    async def _is_back(self, record: JobRecord) -> bool:
        """True if the user lifted a job's quarantine. A job that is not wanted any more ends."""
        if record.desired is Desired.CANCELLED:
            await self._store.jobs.set_status(record.id, JobStatus.CANCELLED, "cancelled in quarantine")
            await forget_gradients(self._folder(record.id))
        if record.desired is not Desired.RUNNING:
            return False
        await self._quarantine.forgive(record.id)
        await self._store.jobs.set_status(record.id, JobStatus.QUEUED, "resumed after its quarantine")
        return True

    async def _run_job(self, job_id: str) -> None:
        """Runs one job to its end. After an error of ours, logs it and continues the job from its ledger, a limited
        number of times in a row. Retries unreadable data as often, then pauses the job. Waits for unreachable peers."""
        self._quarantine.drive(job_id)
        crash, unopened = 0, False
        while crash < MAX_CRASHES:
            began = time.monotonic()
            try:
                now = await self._store.jobs.get(job_id)
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
                self._fleet.look_again()
            except RedisError as error:
                log.warning("job waits: %s", trouble(error) or error, extra={"job": job_id})
                await self._lease.until_writable()
            except Unavailable as error:
                log.warning("job waits: %s", error, extra={"job": job_id})
            except OtherFormat as error:
                if await self._waits_for_its_version(record, str(error)):
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

    async def _waits_for_its_version(self, record: JobRecord, reason: str) -> bool:
        """Says why the job does not run here; True once it is cancelled."""
        cancelled = record.desired is Desired.CANCELLED
        await self._store.jobs.set_status(record.id, JobStatus.CANCELLED if cancelled else record.status, reason)
        if cancelled:
            await forget_gradients(self._folder(record.id))
        return cancelled

    async def _waits_for_its_user(self, record: JobRecord, reason: str) -> bool:
        """Pauses the job until its user resumes it; True once it is cancelled."""
        if record.desired is Desired.CANCELLED:
            await stop_for_good(self._launcher, record.id)
            return await self._waits_for_its_version(record, reason)
        told = f"{reason}; then `flowfleet resume` the job"
        await self._store.jobs.set_status(record.id, JobStatus.PAUSED, told, hold=True)
        return False

    async def _drive(self, record: JobRecord) -> None:
        with ExitStack() as stack:
            async with self._quarantine.opening(record.id):
                data = await opened(record, self._sources, self._store, self._settings.limits)
                stack.callback(data.close)
                ledger = Ledger(self._redis, self._lease, record.id)
                machine = await ledger.restore(data.spec)
                known = await self._store.jobs.first_inputs(record.id, data.fingerprints)
            began = replace(data, fingerprints=known)
            runner = JobDriver(ledger, machine, lambda *parts: self._context(record, began, *parts))
            self._running[record.id] = runner
            try:
                if changed := change(known, data.fingerprints, inputs_of(data.spec)):
                    await runner.hold(changed)
                status = await runner.run()
                log.info("job ended as %s", status, extra={"job": record.id})
            finally:
                del self._running[record.id]
                self._fleet.verified(record.id, None)
                await runner.job.close()

    def _context(self, record: JobRecord, data: JobData, machine: Machine, emit: Any, changes: Changes) -> JobContext:
        spec = machine.spec
        directory = self._folder(record.id)
        directory.mkdir(parents=True, exist_ok=True)
        blobs = open_blobs(self._redis, self._settings.blobs, self._registry)
        deal = Deal(data.training, Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step))
        pool = RolloutPool(self._fleet, record.id, spec, shortage=self._directory.shortage)
        scoring = self._scoring(record.id, spec, blobs)
        core = JobCore(record.id, machine, self._store, pool, scoring, directory)
        return JobContext(
            **vars(core),
            emit=emit,
            changes=changes,
            submitted=record.job_spec(),
            fingerprints=data.fingerprints,
            redis=self._redis,
            blobs=blobs,
            refs=SampleRefs(self._redis, blobs, record.id),
            inputs=Inputs(record.id, blobs, self._sources),
            deal=deal,
            held_out=data.held_out,
            trainer=JobTrainer(self._launcher, record.id, spec, GradientRewards(self._directory, spec)),
            reports=Reports(core, self._metrics, ShadowQueue(core, self._shadow_metrics)),
            memory=self._memory,
            pictures=Pictures(self._store, blobs, record.id, spec.schedule.keep_pictures),
        )

    def _scoring(self, job_id: str, spec: JobSpec, blobs: BlobStore) -> Scoring:
        job_rewards = JobRewards(
            self._directory,
            spec.timeouts.score_s,
            modality_of(spec),
            self._reward_calls,
            partial(changed_file, partial(self._store.rewards.file, job_id), self._settings.state_dir / RELOADED),
            patience_s=spec.timeouts.rewards_s,
            pending_s=spec.timeouts.pending_s,
        )
        return Scoring(job_rewards, blobs)

    async def _return(self, job_id: str, reason: str) -> None:
        """Puts a job whose trainer found no place back into the queue, and lets others of its pool go ahead."""
        delay_s = self._returned.add(job_id, time.monotonic())
        told = f"{NO_PLACE} {reason}; tried again within {delay_s:.0f} s, or when another job ends"
        log.warning("job returns to the queue: %s", told, extra={"job": job_id})
        await self._record(job_id, JobStatus.QUEUED, told)

    async def _fail(self, job_id: str, reason: str) -> None:
        await stop_for_good(self._launcher, job_id)
        await self._record(job_id, JobStatus.FAILED, reason)
        await forget_gradients(self._folder(job_id))

    async def _record(self, job_id: str, status: JobStatus, reason: str) -> None:
        try:
            await self._store.jobs.set_status(job_id, status, reason)
        except (Conflict, NotFound, RedisError) as error:
            log.error("could not record the job as %s: %s", status, error, extra={"job": job_id})

    def _folder(self, job_id: str) -> Path:
        return self._settings.state_dir.resolve() / JOBS / job_id


@contextmanager
def _may_fail() -> Iterator[None]:
    """Checks the jobs once; the next check follows soon. Whatever fails here, running jobs continue."""
    try:
        yield
    except LeaseLost:
        raise
    except RedisError as error:
        log.warning("scheduler could not check jobs: %s", trouble(error) or error)
    except Exception:
        log.exception("scheduler could not check jobs")


def _tell_end(task: asyncio.Task[None]) -> None:
    """Reports the scheduler's end. If it ends by itself /healthz fails, so that the controller is restarted."""
    if not task.cancelled():
        log.critical("scheduler ended", exc_info=task.exception())
