"""Starts, finds again and stops the trainers of jobs: the protocol that each platform implements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from flowfleet.job.spec import JobSpec
from services.controller.platforms.job_users import JobUsers
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.waiting import WaitedInVain

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

    @property
    def admitted(self) -> Collection[str]:
        """Jobs that have places for their trainers, also after the controller was restarted."""

    async def admit(self, job_id: str, spec: JobSpec) -> str:
        """Gives the job places for its trainer, which are its own until `leave`. Returns "", or why there are none now,
        in words that follow "waits for"."""

    async def leave(self, job_id: str) -> None:
        """Gives the places of the job's trainer, which has ended, to others."""


class FencedLauncher:
    """A launcher that starts and ends trainers only while this controller leads, and starts those alone that have their
    places. Each has a user of Redis of its own."""

    def __init__(self, launcher: Launcher, lease: Lease, users: JobUsers) -> None:
        self._launcher, self._lease, self.users = launcher, lease, users
        self._why: dict[str, str] = {}
        """Job → why it has no places."""

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        """Raises WaitedInVain for a job without places."""
        await self._lease.confirm()
        if job_id not in self.admitted:
            raise WaitedInVain(self._why.get(job_id, "it waits in the queue"))
        await self.users.make(job_id, spec)
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
        await self.users.keep_only(job_ids)

    @property
    def admitted(self) -> Collection[str]:
        return self._launcher.admitted

    async def admit(self, job_id: str, spec: JobSpec) -> str:
        await self._lease.confirm()
        why = await self._launcher.admit(job_id, spec)
        self._why[job_id] = f"it waits for {why}"
        return why

    async def leave(self, job_id: str) -> None:
        await self._lease.confirm()
        await self._launcher.leave(job_id)
        await self.users.remove(job_id)


async def stopped(launcher: Launcher | FencedLauncher, job_id: str, *, at_once: bool = False) -> bool:
    """Ends the trainer; False, and said in the log, if that did not work. Raises nothing but LeaseLost."""
    try:
        await launcher.stop(job_id, at_once=at_once)
    except LeaseLost:
        raise
    except Exception as error:  # of whatever there is between us and it: no job ends otherwise because of that
        log.warning("could not end the trainer: %s: %s", type(error).__name__, error, extra={"job": job_id})
        return False
    return True


async def stop_for_good(launcher: Launcher | FencedLauncher, job_id: str) -> None:
    """Retries `stopped`, then gives the trainer's places to others. Trainers that remain get no more calls and end by
    themselves, or by `keep_only`."""
    for _ in range(STOP_TRIES):
        if await stopped(launcher, job_id):
            break
        await asyncio.sleep(STOP_DELAY_S)
    else:
        log.error("could not stop the trainer of an ended job", extra={"job": job_id})
    await launcher.leave(job_id)
