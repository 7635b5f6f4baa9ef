"""Lets tasks proceed one at a time, so that requests that were ready together do not stay together.

Answers that arrive at once wake their tasks in one turn of the event loop. If each task then prepared its next request
before any request is sent, all would leave late and together. Their answers would arrive at once again, so a server of
fixed latency would idle in between, forever. A task that takes a turn here first lets the requests before it leave.
"""

import asyncio
from collections import deque


class Turns:
    """Turns for one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def take(self) -> None:
        """Waits for a free turn of the event loop; callers are served in order."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _next(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
