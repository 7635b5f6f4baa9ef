"""Several servers of one model: each with its limit and its breaker, and who waits for a place.

A question goes to the server with the most room among those that may be asked. Where all are left alone, it fails at
once, with the reason that each was left alone for. I/O is the client's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from services.reward.judge.calls.breaker import BreakerState, CircuitBreaker
from services.reward.judge.calls.limiter import AimdLimiter
from services.reward.judge.errors import CallFailed
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import JudgeSettings


@dataclass(eq=False)
class Server:
    """`last_failure` is what the latest failed call said; one that `refuses_logprobs` is asked without them."""

    url: str
    limiter: AimdLimiter
    breaker: CircuitBreaker
    last_failure: str = ""
    refuses_logprobs: bool = False

    @property
    def is_free(self) -> bool:
        return self.breaker.allows and self.limiter.has_room


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Leave to make one call."""

    server: Server
    began: float
    probe: bool


class Servers:
    """Servers for one event loop."""

    def __init__(self, settings: JudgeSettings, metrics: JudgeMetrics) -> None:
        limits = settings.concurrency, settings.max_concurrency, settings.target_latency_s
        cooling = settings.breaker_failures, settings.breaker_cooldown_s, settings.breaker_max_cooldown_s
        self._servers = [
            Server(url, AimdLimiter(*limits, time.monotonic), CircuitBreaker(*cooling, time.monotonic))
            for url in settings.urls
        ]
        self._waiting: deque[tuple[asyncio.Future[Place], Server | None]] = deque()
        for server in self._servers:
            metrics.watch(server.url, server.limiter, server.breaker)

    async def place(self, avoid: Server | None = None) -> Place:
        """Waits for a place; rather not at `avoid`. Raises CallFailed where every server is left alone."""
        if self._all_open:
            raise self._open_failure()
        place = self._place_now(avoid) if not self._waiting else None
        if place is not None:
            return place
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, avoid))
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.leave(granted.result(), counts=False)
            raise

    def _place_now(self, avoid: Server | None = None) -> Place | None:
        """A place if there is one; rather not at `avoid`."""
        free = [server for server in self._servers if server.is_free]
        if not free:
            return None
        server = min(free, key=lambda one: (one is avoid, one.limiter.in_flight / one.limiter.limit))
        return Place(server, server.limiter.acquire(), server.breaker.begin())

    def leave(self, place: Place, failure: CallFailed | None = None, *, counts: bool = True) -> None:
        """The call ended: answered, failed, or (not `counts`) cancelled."""
        server = place.server
        crowded = failure is not None and failure.crowded
        server.limiter.release(place.began, crowded=crowded, counts=counts and (failure is None or crowded))
        if not counts:
            server.breaker.forget(place.probe)
        elif failure is None or not failure.blames_server:
            server.breaker.succeed(place.probe)
        else:
            server.last_failure = str(failure)
            server.breaker.fail(place.probe)
        self._grant()

    def _grant(self) -> None:
        """Gives free places to those who wait longest; fails them where every server is left alone."""
        while self._waiting:
            granted, avoid = self._waiting[0]
            if not granted.done():
                if self._all_open:
                    granted.set_exception(self._open_failure())
                elif place := self._place_now(avoid):
                    granted.set_result(place)
                else:
                    return
            self._waiting.popleft()

    @property
    def _all_open(self) -> bool:
        return all(server.breaker.state is BreakerState.OPEN for server in self._servers)

    def _open_failure(self) -> CallFailed:
        wait_s = min(server.breaker.wait_s for server in self._servers)
        reasons = "; ".join(dict.fromkeys(server.last_failure for server in self._servers))
        return CallFailed("circuit_open", f"{reasons} (left alone for {wait_s:.1f} s more)", retry=False)
