"""Trainers that somebody else starts, for jobs with `trainer.launcher = "attach"`; the platform starts those of others.

The controller waits for the job's ranks, and says so. They prove themselves by the token of their job, and get in
return what a trainer of that job needs: its user of Redis, its tokens, where Redis is.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import time
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from flowfleet.api.attach import Announcement, Attached
from flowfleet.errors import Conflict, Unauthenticated, Unavailable
from flowfleet.job.spec import JobSpec
from flowfleet.local.files import read_own, write_atomically
from flowfleet.process import service
from flowfleet.redis.client import REDIS_LOGIN, with_login
from flowfleet.rpc.kinds import REWARD_TOKEN, job_accept, job_secrets, trainer_environment
from services.controller.platforms.attach.desk import Desk
from services.controller.platforms.launcher import Launcher
from services.controller.waiting import WaitedInVain

ENDED_S: Final = 30.0
"""Longest wait for ranks that must end."""
_POLL_S: Final = 0.2
_GIVEN: Final = ("FLOWFLEET_REDIS_URL", REWARD_TOKEN, "FLOWFLEET_BLOBS", "FLOWFLEET_HUB_MODELS", service.STATE_DIR)


class AttachLauncher:
    def __init__(self, platform: Launcher, state_dir: Path) -> None:
        self._platform, self._state_dir = platform, state_dir.resolve()
        self._desks: dict[str, Desk] = {}

    async def announce(self, rank: Announcement) -> Attached:
        """A rank's sign of life. Raises Unavailable where it must ask again; Conflict where it must end."""
        job_id = job_of(rank.token)
        if _number(rank.version) < _number(own := version("flowfleet")):
            raise Conflict(
                f"the rank has Flowfleet {rank.version}, older than the controller's {own}: install {own} there"
            )
        if (desk := self._desks.get(job_id)) is None:
            raise Unavailable(f"job {job_id} waits in the queue or is paused, so it takes no ranks yet")
        before = desk.last
        attempt = desk.announce(rank, desk.attempt.secrets if desk.attempt else _secrets(job_id), time.monotonic())
        if desk.last != before:
            write_atomically(self._file(job_id), str(desk.last))
        environment = {} if rank.attempt or rank.left else {**attempt.secrets, service.STATE_DIR: str(self._state_dir)}
        return Attached(attempt=attempt.number, environment=environment, end=attempt.end)

    def expects(self, job_id: str) -> bool:
        """True for a job that takes ranks now."""
        return job_id in self._desks

    # -- as `Launcher` -------------------------------------------------------------------------------------------

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        if spec.trainer.launcher != "attach":
            return await self._platform.ensure(job_id, spec)
        desk = self._desk(job_id, spec)
        if address := self._serves(desk):
            return address
        raise WaitedInVain(f"trainer: {desk.waits_for()}: `flowfleet attach {job_id}` prints their command")

    async def alive(self, job_id: str) -> bool:
        desk = self._desks.get(job_id)
        return bool(self._serves(desk)) if desk else await self._platform.alive(job_id)

    def placed(self, job_id: str) -> bool:
        desk = self._desks.get(job_id)
        return bool(desk.serves()) if desk else self._platform.placed(job_id)

    async def termination_message(self, job_id: str) -> str:
        desk = self._desks.get(job_id)
        return desk.words if desk else await self._platform.termination_message(job_id)

    async def ended(self, job_id: str) -> None:
        if desk := self._desks.get(job_id):
            await self._gone(desk)
        else:
            await self._platform.ended(job_id)

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        """Tells the ranks to end, and returns once they have, or after a while."""
        if (desk := self._desks.get(job_id)) is None:
            await self._platform.stop(job_id, at_once=at_once)
        elif desk.attempt:
            desk.attempt.end = "now" if at_once else desk.attempt.end or "drain"
            await self._gone(desk)

    async def keep_only(self, job_ids: Collection[str]) -> None:
        """Ranks of other jobs hear of it when they announce themselves."""
        for path in self._state_dir.glob("attached/*"):
            if path.name not in job_ids:
                path.unlink(missing_ok=True)
        await self._platform.keep_only(job_ids)

    @property
    def admitted(self) -> Collection[str]:
        return {*self._platform.admitted, *self._desks}

    async def admit(self, job_id: str, spec: JobSpec) -> str:
        if spec.trainer.launcher != "attach":
            return await self._platform.admit(job_id, spec)
        self._desk(job_id, spec)
        return ""

    async def leave(self, job_id: str) -> None:
        if self._desks.pop(job_id, None) is None:
            await self._platform.leave(job_id)

    def _desk(self, job_id: str, spec: JobSpec) -> Desk:
        if job_id not in self._desks:
            file = self._file(job_id)
            last = int(read_own(file)) if file.exists() else 0
            self._desks[job_id] = Desk(job_id, spec.trainer.world_size, last, time.monotonic())
        return self._desks[job_id]

    def _serves(self, desk: Desk) -> str:
        desk.look(time.monotonic())
        return desk.serves()

    async def _gone(self, desk: Desk) -> None:
        until = time.monotonic() + ENDED_S
        while desk.attempt and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            desk.look(time.monotonic())

    def _file(self, job_id: str) -> Path:
        return self._state_dir / "attached" / job_id


def attach_token(job_id: str) -> str:
    """The token by which ranks prove that they are the trainer of a job."""
    key = service.secret(service.RPC_TOKEN) or ""
    return f"{job_id}/{hmac.new(key.encode(), f'attaches to job {job_id}'.encode(), hashlib.sha256).hexdigest()}"


def job_of(token: str) -> str:
    """The job of an attach token. Raises Unauthenticated for any other text."""
    job_id = token.partition("/")[0]
    if not hmac.compare_digest(token.encode(), attach_token(job_id).encode()):
        raise Unauthenticated("this is not the token of a job of this controller: `flowfleet attach ID` prints it")
    return job_id


def _secrets(job_id: str) -> Mapping[str, str]:
    """Environment of the ranks of one attempt."""
    base = trainer_environment(os.environ)
    given = {name: base[name] for name in _GIVEN if name in base} | job_accept(job_id) | job_secrets(job_id)
    url, login = given["FLOWFLEET_REDIS_URL"], given.pop(REDIS_LOGIN, "")
    if "sentinel_password" in url and not os.environ.get("FLOWFLEET_TRAINER_REDIS_URL"):
        raise Conflict("set FLOWFLEET_TRAINER_REDIS_URL at the controller: its own URL has its password for Sentinels")
    return given | {"FLOWFLEET_REDIS_URL": with_login(url, login)}


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
