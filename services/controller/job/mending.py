"""A pause that ends by itself: the driver asks now and then whether its cause is gone.

Nothing of it is stored. A controller that takes over resumes such a job at once, and the job pauses again if the cause
is still there.
"""

import asyncio
import logging
import time

from redis.exceptions import RedisError

from services.controller.concurrency import end
from services.controller.waiting import Check

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""From one check to the next."""


class Mending:
    """The cause of a job's pause, if it may go away without its user."""

    def __init__(self) -> None:
        self._check: Check | None = None
        self._task: asyncio.Task[bool] | None = None
        self._asked = float("-inf")

    def wait_for(self, check: Check | None) -> None:
        """None: there is nothing to wait for."""
        if self._task is not None:
            self._task.cancel()  # its answer is about a former pause
            self._task = None
        self._check, self._asked = check, time.monotonic()

    def is_over(self) -> bool:
        """True if the job may be resumed. Starts the next check when it is due, and never waits for one."""
        if self._check is None:
            return True
        if self._task is None:
            if time.monotonic() - self._asked >= EVERY_S:
                self._task = asyncio.create_task(self._ask(self._check))
            return False
        if not self._task.done():
            return False
        task, self._task, self._asked = self._task, None, time.monotonic()
        return task.result()

    async def _ask(self, check: Check) -> bool:
        try:
            return await check()
        except RedisError:  # it cannot be known now
            return False
        except Exception as error:  # the job finds out itself, and says so
            log.warning("check of a pause failed: %s: %s", type(error).__name__, error)
            return True

    async def close(self) -> None:
        await end([self._task] if self._task else [])
