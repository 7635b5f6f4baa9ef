"""A user of Redis for each job's trainer, which reaches the keys of that job alone (flowfleet/redis/acl.py).

The user is made before a trainer starts and removed once it has left. Redis may lose it, by a restart or a failover,
which copies no users: the leader looks every second and makes it again, while the trainer's clients retry. Its password
comes from the controller's token, so nothing stores it.
"""

import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from flowfleet.job.spec import JobSpec
from flowfleet.redis.acl import JOB_USER, job_user, job_words
from flowfleet.rpc.kinds import JOB_USERS, has_job_users, job_password
from services.controller.waiting import WaitedInVain

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_SELECTORS: Final = 7


class JobUsers:
    """Does nothing in a fleet without tokens, or without such users."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._made: dict[str, list[str]] = {}
        """Job → what makes its user."""
        self._looked = 0.0

    async def make(self, job_id: str, spec: JobSpec) -> None:
        """Raises WaitedInVain where Redis lets the controller make no users."""
        if not has_job_users():
            return
        version = str((await self._redis.info("server"))["redis_version"])
        selectors = int(version.partition(".")[0]) >= _SELECTORS
        samples = spec.trainer.samples != "no"
        words = job_words(job_id, job_password(job_id), samples=samples, selectors=selectors)
        try:
            await self._redis.execute_command("ACL", "SETUSER", *words)
        except (NoPermissionError, ResponseError) as error:
            raise WaitedInVain(
                f"Redis lets the controller make no user for the trainer ({error}): give it the rights that `flowfleet "
                f"redis-acl` prints, or set {JOB_USERS}=no, and trainers share FLOWFLEET_TRAINER_REDIS_URL"
            ) from None
        self._made[job_id] = words

    async def renew(self) -> None:
        """Makes those again that Redis has lost. Cheap: called at each look of the scheduler."""
        if self._made and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            for job_id in {*self._made}.difference(await self._jobs()):
                log.warning("Redis has lost the user of the trainer; making it again", extra={"job": job_id})
                await self._redis.execute_command("ACL", "SETUSER", *self._made[job_id])

    async def remove(self, job_id: str) -> None:
        self._made.pop(job_id, None)
        if has_job_users():
            with contextlib.suppress(NoPermissionError):  # then there is none
                await self._redis.execute_command("ACL", "DELUSER", job_user(job_id))

    async def keep_only(self, job_ids: Collection[str]) -> None:
        """Removes those that an earlier controller left."""
        with contextlib.suppress(NoPermissionError):
            for job_id in (await self._jobs()).difference(job_ids) if has_job_users() else ():
                await self.remove(job_id)

    async def _jobs(self) -> set[str]:
        names = [name.decode() for name in await self._redis.execute_command("ACL", "USERS")]
        return {name.removeprefix(JOB_USER) for name in names if name.startswith(JOB_USER)}
