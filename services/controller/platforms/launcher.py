"""Starts, finds again and stops the trainers of jobs: the protocol that each platform implements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from flowfleet.job.spec import JobSpec
from services.controller.store.leadership import Lease, LeaseLost

log = logging.getLogger(__name__)

STOP_TRIES = 5
STOP_DELAY_S = 1.0


class Launcher(Protocol):
    """Where trainers run: processes here, Jobs on Kubernetes."""

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        """The address (host:port) of the job's live trainer, started if there is none.

        Raises ValueError for a job whose trainer cannot run here, NoPlace for one that found no place in time.
        """

    async def alive(self, job_id: str) -> bool:
        """True if the trainer that `ensure` gave is still there. Cheap: called every second."""

    def placed(self, job_id: str) -> bool:
        """True if all processes of the trainer have a place to run. Until then rollouts of the job take none away."""

    async def termination_message(self, job_id: str) -> str:
        """Why the trainer ended, by its own account; "" for one that lives, or that could not tell."""

    async def ended(self, job_id: str) -> None:
        """Waits a while for a trainer that ends by itself."""

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        """Ends the trainer, if there is one; `at_once` one that hangs, which can handle no signal."""

    async def keep_only(self, job_ids: Collection[str]) -> None:
        """Ends the trainers of all other jobs: those of ended ones, which a killed controller left."""


class FencedLauncher:
    """A launcher that starts and ends trainers only while this controller leads."""

    def __init__(self, launcher: Launcher, lease: Lease) -> None:
        self._launcher, self._lease = launcher, lease

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        await self._lease.confirm()
        return await self._launcher.ensure(job_id, spec)

    async def alive(self, job_id: str) -> bool:
        return await self._launcher.alive(job_id)

    def placed(self, job_id: str) -> bool:
        return self._launcher.placed(job_id)

    async def termination_message(self, job_id: str) -> str:
        return await self._launcher.termination_message(job_id)

    async def ended(self, job_id: str) -> None:
        await self._launcher.ended(job_id)

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        await self._lease.confirm()
        await self._launcher.stop(job_id, at_once=at_once)

    async def keep_only(self, job_ids: Collection[str]) -> None:
        await self._lease.confirm()
        await self._launcher.keep_only(job_ids)


async def stopped(launcher: Launcher, job_id: str, *, at_once: bool = False) -> bool:
    """Ends the trainer; False, and said in the log, if that did not work. Raises nothing but LeaseLost."""
    try:
        await launcher.stop(job_id, at_once=at_once)
    except LeaseLost:
        raise
    except Exception as error:  # of whatever there is between us and it: no job ends otherwise because of that
        log.warning("could not end the trainer: %s: %s", type(error).__name__, error, extra={"job": job_id})
        return False
    return True


async def stop_for_good(launcher: Launcher, job_id: str) -> None:
    """Retries `stopped`. Trainers that remain get no more calls and end by themselves, or by `keep_only`."""
    for _ in range(STOP_TRIES):
        if await stopped(launcher, job_id):
            return
        await asyncio.sleep(STOP_DELAY_S)
    log.error("could not stop the trainer of an ended job", extra={"job": job_id})
