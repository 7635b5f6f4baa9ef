"""Keeps Redis from growing for ever: archives and removes jobs that have ended. The leader runs it.

Each look goes from the store alone, and each step of it may be repeated, so a controller that dies in the middle is
continued by the next one. All that is written is fenced by the leader's term. What goes is archived first, where the
operator has an archive; while that cannot be written nothing is removed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.exceptions import RedisError

from flowfleet.client.archive import Archive
from flowfleet.data.blobs import PICTURE_TTL_S, BlobStore
from flowfleet.redis import keys
from flowfleet.redis.trouble import trouble
from services.controller.prompts.uploads import SWEEP_EVERY_S, Uploads
from services.controller.retention.archiving import archive_job
from services.controller.retention.folders import Folders
from services.controller.retention.keep import DAY_S, Keep, clocks_differ, to_remove, too_many
from services.controller.retention.memory import Memory
from services.controller.store.leadership import LeaseLost
from services.controller.store.removal import EndedJob, Leftover
from services.controller.store.store import Store

log = logging.getLogger(__name__)

PERIOD_S = 5.0
READ_ALL_S = 300.0
PICTURES = ("media", "given")
WORKING_BLOBS = ("trajectory", "embeds", "negative", "condition", "adapter", "evaluated")
"""Kinds of blobs that only a running job needs."""


class Keeper:
    """`store` is fenced by the lease of the controller that leads. `clock` is its own, to check Redis's."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        keep: Keep,
        archive: Archive | None = None,
        *,
        memory: Memory | None = None,
        registry: CollectorRegistry | None = None,
        blobs_in_redis: bool = True,
        uploads: Uploads | None = None,
        folders: Folders | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._in_redis = blobs_in_redis  # those go with the job's keys
        self._store, self._blobs = store, blobs
        self._keep, self._archive, self._memory, self._clock = keep, archive, memory, clock
        self._uploads, self._folders, self._swept = uploads, folders, float("-inf")
        self._ended: dict[str, EndedJob] = {}
        """Jobs that have ended, as they were read last; one that ends or is deleted is among the leftovers."""
        self._read_all = float("-inf")
        self._sizes: dict[str, int] = {}
        """Job → bytes of Redis that its history takes; an ended job does not grow."""
        registry = registry or CollectorRegistry()
        self._failures = Counter(
            "flowfleet_controller_archive_failures_total",
            "Times that an ended job could not be archived",
            registry=registry,
        )
        self._held = Gauge(
            "flowfleet_controller_retention_held",
            "1 while limits remove no ended job until an operator has looked",
            registry=registry,
        )

    async def run(self) -> None:
        """Looks every few seconds, first at all ended jobs. Errors are logged: jobs run all the same."""
        self._read_all = float("-inf")
        while True:
            try:
                await self.look()
            except LeaseLost:
                raise
            except RedisError as error:
                log.warning("keeper waits: %s", trouble(error) or error)
            except Exception:
                log.exception("keeper failed and will retry")
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Archives and removes what is due, then clears what is left of it. Raises LeaseLost on a controller
        that leads no more: the keeper ends there even if a connection swallowed its cancellation."""
        await self._store.confirm()
        now = await self._store.link.now()
        left = await self._store.removal.leftovers()
        jobs = await self._read(now, left)
        await self._measure(jobs)
        clocks = clocks_differ(now, self._clock())
        removed, held = await self._due(jobs, now, clocks)
        for job in jobs:
            if not await self._archived(job):
                continue
            if job.job_id in removed:
                if job.with_files and not await self._files_gone(job.job_id):
                    continue
                log.info("keeper removed a job: %s", removed[job.job_id], extra={"job": job.job_id})
                await self._store.removal.remove(job.job_id, removed[job.job_id])
                self._ended.pop(job.job_id, None)
                left.append(Leftover(job.job_id, again=False))
        await self._clear(left)
        if not 0 <= (passed := now - self._swept) < SWEEP_EVERY_S:
            self._swept = now
            if not clocks:
                await self._attempt("pictures", self._blobs.sweep(PICTURES, PICTURE_TTL_S, now))
            if self._uploads is not None and not clocks:
                await self._attempt("uploads", self._sweep(self._uploads))
            if self._folders is not None:
                if not held:
                    seen_s = 0.0 if passed == float("inf") else SWEEP_EVERY_S
                    await self._attempt("folders", self._sweep_folders(self._folders, seen_s))
                await self._attempt("the metric of folders", asyncio.to_thread(self._folders.measure))

    async def _attempt(self, what: str, sweep: Awaitable[object]) -> None:
        """Sweeps; an error must not keep the other sweeps from their turn."""
        try:
            await sweep
        except LeaseLost:
            raise
        except Exception:  # of whatever a store's client raises
            log.exception("keeper could not sweep %s and will in an hour", what)

    async def _due(self, jobs: list[EndedJob], now: float, clocks: str) -> tuple[dict[str, str], str]:
        """Jobs to remove, each with the reason, and why limits are held: then only what was deleted goes."""
        limit = await self._memory.limit() if self._memory else 0
        keep = self._keep.within(limit) if limit else self._keep
        gone = to_remove(jobs, self._sizes, keep, now)
        held = clocks or too_many(jobs, gone, keep, now)
        self._held.set(bool(held))
        if held:
            await self._store.removal.hold(held)
            gone = {job.job_id: gone[job.job_id] for job in jobs if job.wanted_gone}
        return gone, held

    async def _read(self, now: float, left: list[Leftover]) -> list[EndedJob]:
        """Ended jobs, the first to end first. Reads all at first and now and then, because a controller of an earlier
        release leaves no leftover of a job that is to be deleted; else those among the leftovers."""
        if not 0 <= now - self._read_all < READ_ALL_S:
            found, self._read_all = await self._store.removal.ended(), now
            self._ended.clear()
        else:
            found = await self._store.removal.ended([leftover.job_id for leftover in left])
        self._ended |= {job.job_id: job for job in found}
        return sorted(self._ended.values(), key=lambda job: (job.ended_at, job.job_id))

    async def _sweep(self, uploads: Uploads) -> None:
        """Removes uploads that no job names."""
        if await asyncio.to_thread(uploads.expired):
            named = await self._store.removal.named_uploads()
            for name in await asyncio.to_thread(uploads.sweep, named):
                log.info("keeper removed an upload: no job names %s", name)

    async def _files_gone(self, job_id: str) -> bool:
        """Removes a job's folder; False while a job that has not ended starts from it."""
        if job_id in await self._store.removal.named_jobs():
            return False
        if self._folders is not None:
            await asyncio.to_thread(self._folders.remove, job_id)
        return True

    async def _sweep_folders(self, folders: Folders, passed: float) -> None:
        """Ages and removes folders of jobs that this Redis removed. `passed`: seconds since the last look."""
        if there := await asyncio.to_thread(folders.job_ids):  # none: the volume may not be mounted
            in_use = await self._store.removal.named_jobs() | set(await self._store.removal.known())
            ages = await self._store.removal.age_folders(there, in_use, passed)
            days = math.inf if self._keep.folder_days is None else self._keep.folder_days
            for job_id in [one for one, age in ages.items() if age > days * DAY_S]:
                log.info("keeper removed a job's folder: its job went %g days ago", days, extra={"job": job_id})
                await asyncio.to_thread(folders.remove, job_id)

    async def _measure(self, jobs: list[EndedJob]) -> None:
        known, self._sizes = self._sizes, {}
        for job in jobs:
            size = known.get(job.job_id)
            self._sizes[job.job_id] = await self._store.removal.history_bytes(job.job_id) if size is None else size

    async def _archived(self, job: EndedJob) -> bool:
        """Archives a job that is not yet. False where that did not work, which is tried again."""
        if self._archive is None or job.archive:
            return True
        try:
            folder = await archive_job(self._store, self._blobs, self._archive, job.job_id)
        except (LeaseLost, RedisError):
            raise
        except Exception as error:  # of whatever a store's client raises: the other jobs must not wait for this one
            self._failures.inc()
            cause = f"{type(error).__name__}: {error}"
            log.error("keeper could not archive to %s: %s", self._archive.url, cause, extra={"job": job.job_id})
            return False
        await self._store.removal.mark_archived(job.job_id, folder)
        self._ended[job.job_id] = replace(job, archive=folder)
        return True

    async def _clear(self, left: list[Leftover]) -> None:
        """Clears these leftovers alone: a job that has ended since must be among them when jobs are read next."""
        if not self._in_redis:
            for leftover in left:
                kinds = WORKING_BLOBS if await self._store.removal.exists(leftover.job_id) else ("",)
                for kind in kinds:
                    await self._blobs.delete_prefix(keys.blob(leftover.job_id, *filter(None, [kind])) + ":")
        if left:
            await self._store.removal.clear(left)
