"""How controllers tell each other at once what they would find at their next look: a job was submitted or steered, or
the demand is another one. Nothing depends on a message: all who listen also look by themselves."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from flowfleet.redis import keys

log = logging.getLogger(__name__)

SILENCE_S = 5.0
RETRY_S = 1.0


async def notify(redis: Any) -> None:
    """Wakes every listener."""
    with contextlib.suppress(RedisError):
        await redis.publish(keys.changes(), "")


async def listen(redis: Any, heard: Callable[[], None]) -> None:
    """Calls `heard` at every change, and after each gap in which one may have been missed; until cancelled."""
    while True:
        try:
            async with redis.pubsub(ignore_subscribe_messages=True) as messages:
                await messages.subscribe(keys.changes())
                heard()
                while True:
                    if await messages.get_message(timeout=SILENCE_S) is not None:
                        heard()
        except RedisError as error:
            log.warning("change subscription lost, reconnecting: %s", error)
            await asyncio.sleep(RETRY_S)
