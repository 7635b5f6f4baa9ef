"""Takes up queued jobs as there are places for their trainers (admission.py), and keeps the running ones going
(runner.py), across restarts of the controller. Of several controllers only the one that holds the lease does
(leadership.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.client.archive import Archive
from flowfleet.data.blobs import open_blobs
from flowfleet.errors import OtherFormat
from flowfleet.process.telemetry import JobMetrics
from flowfleet.redis.trouble import trouble
from services.controller.concurrency import Children, end, wait
from services.controller.fleet.directory import Directory
from services.controller.fleet.replicas import Replica
from services.controller.fleet.watch import FleetWatch
from services.controller.job.context import forget_gradients
from services.controller.job.machine.command import EnsureTrainer
from services.controller.job.machine.state_machine import Machine
from services.controller.job.shadow_queue import ShadowMetrics
from services.controller.jobs.admission import Admission
from services.controller.jobs.quarantine import Quarantine
from services.controller.jobs.returned import Returned
from services.controller.jobs.runner import JobRunner, Shared
from services.controller.metrics.monitor import Monitor
from services.controller.platforms.job_users import JobUsers
from services.controller.platforms.launcher import FencedLauncher, Launcher, stop_for_good
from services.controller.retention.folders import Folders
from services.controller.retention.keeper import Keeper
from services.controller.retention.memory import Memory
from services.controller.rewards.metrics import RewardCalls
from services.controller.scaling.demand import DemandHash, demand, work_of
from services.controller.settings import ControllerSettings
from services.controller.store.changes import listen, notify
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.store.records import JobRecord
from services.controller.store.replication import Replication
from services.controller.store.store import Store

log = logging.getLogger(__name__)

POLL_S = 1.0
LOAD_EVERY_S = 5.0
REST_S = 0.1
"""At least, from look to look: of many jobs one always wakes the runner, as does the demand that it tells itself."""


class JobScheduler:
    """The jobs of this controller: those run that have places for their trainers, the others queue."""

    def __init__(
        self,
        settings: ControllerSettings,
        redis: Redis,
        store: Store,
        registry: CollectorRegistry,
        launcher: Launcher,
        directory: Directory,
    ) -> None:
        self._redis = redis
        self._sources = settings.sources
        self._replication = Replication(redis, settings.state_dir, settings.redis_acks, registry)
        self._lease = Lease(redis, registry, self._replication)
        self._store = store.fenced_by(self._lease)
        self._launcher = FencedLauncher(launcher, self._lease, JobUsers(redis))
        self._demand = DemandHash(redis)
        self._fleet = FleetWatch(redis)
        metrics = JobMetrics(registry)
        self._reward_calls = RewardCalls(registry)
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
        self._records: dict[str, JobRecord] = {}
        """Records of the jobs that have not ended, as of the last check; the submitted job never changes."""
        shared = Shared(
            settings,
            redis,
            registry,
            self._lease,
            self._store,
            self._launcher,
            directory,
            self._fleet,
            self._sources,
            self._memory,
            self._quarantine,
            metrics,
            self._reward_calls,
            ShadowMetrics(registry),
        )
        self._runner = JobRunner(shared, self._records, self._returned)
        self._admission = Admission(self._launcher, settings.limits)
        add_seconds = self._store.lists.add_seconds
        self._monitor = Monitor(registry, redis, self._machines, self.fleet_view, add_seconds, metrics)
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
        return {job_id: runner.machine for job_id, runner in self._runner.drivers.items()}

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
        """Runs the jobs that have places for their trainers. Meanwhile all others follow their users' requests."""
        tasks: dict[str, asyncio.Task[None]] = {}
        is_first = True
        while True:
            self._wake.clear()
            with _may_fail():
                active = await self._store.jobs.active()
                if is_first:
                    await self._end_others(active)
                    await self._quarantine.take_over()
                    is_first = False
                for job_id in set(self._launcher.admitted).difference(active):
                    await self._launcher.leave(job_id)
                await self._set_aside(tasks)
                tasks = {job_id: task for job_id, task in tasks.items() if not task.done()}
                ready = await self._ready(active, tasks)
                waiting = {record.id: record for record in ready if self._wants_places(record)}
                await self._tell_why(waiting, await self._admission.admit(waiting.values(), ready, time.time()))
                for record in ready:
                    if record.id not in tasks and self._may_run(record):
                        tasks[record.id] = children.create_task(self._runner.run(record.id), name=f"job {record.id}")
                        tasks[record.id].add_done_callback(lambda _: self._wake.set())
                await self._tell_demand(record for record in ready if record.id in self._launcher.admitted)
                await self._launcher.users.renew()
            await wait(self._wake, POLL_S)
            await asyncio.sleep(REST_S)

    def _wants_places(self, record: JobRecord) -> bool:
        """True for a job that waits for its first trainer, or for another one after a pause."""
        if record.id in self._launcher.admitted or record.desired is not Desired.RUNNING:
            return False
        driver = self._runner.drivers.get(record.id)
        return record.status is JobStatus.QUEUED if driver is None else EnsureTrainer() in driver.machine.commands(0)

    def _may_run(self, record: JobRecord) -> bool:
        """A job that has begun is driven also without places: it answers its user, and rests."""
        has_begun = record.status is not JobStatus.QUEUED or record.desired is Desired.PAUSED
        return has_begun or record.id in self._launcher.admitted

    async def _tell_why(self, waiting: Mapping[str, JobRecord], why: Mapping[str, str]) -> None:
        """Says in queued jobs' records why they wait; a driver says it for its own job."""
        for job_id, record in waiting.items():
            reason = f"it waits for {why[job_id]}" if job_id in why else ""
            if record.status is JobStatus.QUEUED and reason != record.reason and job_id not in self._runner.drivers:
                await self._store.jobs.set_status(job_id, record.status, reason)
                self._records[job_id] = record.model_copy(update={"reason": reason})

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

    async def _tell_demand(self, records: Iterable[JobRecord]) -> None:
        """How many replicas these jobs need now. Those whose trainers wait for a place need none."""
        works, now = [], time.monotonic()
        for record in records:
            if self._launcher.placed(record.id):
                self._returned.placed(record.id, now)
            if not self._returned.has_place(record.id, now):
                continue
            runner = self._runner.drivers.get(record.id)
            state = () if runner is None else (runner.machine, sum(map(len, runner.job.held_out)))
            works.append(work_of(record, *state))
        in_flight = Counter[str]()
        for replica in self._fleet.fleet.all():
            in_flight[replica.pool] += replica.outstanding
        await self._demand.write(self._lease, demand(filter(None, works), in_flight))

    async def _ready(self, active: list[str], running: Collection[str]) -> list[JobRecord]:
        """Jobs that run or may, oldest first. Ends the queued jobs that were cancelled."""
        ready = list[JobRecord]()
        known, self._records = dict(self._records), self._records
        self._records.clear()
        for job_id, present in zip(active, await self._store.jobs.statuses(active), strict=True):
            record = known.get(job_id) or await self._readable(job_id)
            self._records[job_id] = record = record.model_copy(update=present)
            unwanted = record.status is JobStatus.QUEUED and record.desired is Desired.CANCELLED
            if job_id in running:
                ready.append(record)
            elif unwanted:
                await stop_for_good(self._launcher, job_id)
                await self._store.jobs.set_status(job_id, JobStatus.CANCELLED, "cancelled in the queue")
                await forget_gradients(self._runner.folder(job_id))
            elif record.is_unreadable:
                await self._runner.waits_for_its_version(record, record.reason)
            elif self._returned.waits(job_id, time.monotonic()):
                continue
            elif record.status is not JobStatus.QUARANTINED or await self._is_back(record):
                ready.append(record)
        return ready

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
                await end([tasks[job_id]] if job_id in tasks else [])
                await stop_for_good(self._launcher, job_id)
                await self._store.jobs.set_status(job_id, JobStatus.QUARANTINED, reason)

    async def _is_back(self, record: JobRecord) -> bool:
        """True if the user lifted a job's quarantine. A job that is not wanted any more ends."""
        if record.desired is Desired.CANCELLED:
            await self._store.jobs.set_status(record.id, JobStatus.CANCELLED, "cancelled in quarantine")
            await forget_gradients(self._runner.folder(record.id))
        if record.desired is not Desired.RUNNING:
            return False
        await self._quarantine.forgive(record.id)
        await self._store.jobs.set_status(record.id, JobStatus.QUEUED, "resumed after its quarantine")
        return True


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
