"""Asks a judge: the thin driver that puts the state machines of this package around HTTP.

A question waits for a place at a server, is sent, sent a second time elsewhere if it is late, and tried again after a
failure, all within `deadline_s`. Cancelling it closes the connection, by which vLLM knows that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from typing import Final

import aiohttp

from services.reward import http_client
from services.reward.judge.answers import Answer, read_answer
from services.reward.judge.budget import ShareBudget, backoff_s
from services.reward.judge.cache import LruCache
from services.reward.judge.errors import CallFailed, of_status, of_transport, too_late, unreadable
from services.reward.judge.hedging import HedgePolicy
from services.reward.judge.messages import ChatRequest
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.servers import Place, Server, Servers
from services.reward.judge.settings import JudgeSettings

_LONGEST_BACKOFF_S: Final = 10.0


class JudgeClient:
    """For one event loop: `start` it there before the first question, `close` it at the end."""

    def __init__(self, settings: JudgeSettings, metrics: JudgeMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._servers = Servers(settings, metrics)
        self._retries = ShareBudget(settings.retry_share)
        self._hedges = HedgePolicy(settings.hedge_quantile, ShareBudget(settings.hedge_share, reserve=2))
        self._cache: LruCache[Answer] = LruCache(settings.cache_size)
        self._draw = random.Random()
        self._session: aiohttp.ClientSession
        try:
            self._tls = ssl.create_default_context(cafile=settings.ca)
        except ssl.SSLError as error:
            raise ValueError(f"settings.ca: {settings.ca} is no PEM file of certificates: {error}") from error

    async def start(self) -> None:
        key = self._settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = http_client.open_session(self._tls, self._settings.timeout_s, headers)

    async def close(self) -> None:
        await self._session.close()

    def known(self, request: ChatRequest) -> Answer | None:
        """The answer that was kept."""
        answer = self._cache.get(request.key)
        self._metrics.cache.labels(outcome="hit" if answer else "miss").inc()
        return answer

    def keep(self, request: ChatRequest, answer: Answer) -> None:
        """For the next time."""
        self._cache.put(request.key, answer)

    async def ask(self, request: ChatRequest) -> Answer:
        """The answer to a question. Raises CallFailed with the reason of the last try."""
        failures: list[CallFailed] = []
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await self._ask(request, failures)
        except TimeoutError:
            raise self._past_deadline(failures) from None

    def _past_deadline(self, failures: list[CallFailed]) -> CallFailed:
        last = f"; last: {failures[-1]}" if failures else ""
        message = f"no answer of {', '.join(self._settings.urls)} within settings.deadline_s = "
        return CallFailed("timeout", f"{message}{self._settings.deadline_s:g}{last}", retry=False)

    async def _ask(self, request: ChatRequest, failures: list[CallFailed]) -> Answer:
        """Tries until it is answered, or a failure is final, or the budget is spent."""
        self._retries.deposit()
        avoid: Server | None = None
        while True:
            place = await self._servers.place(avoid)
            avoid = place.server
            try:
                return await self._hedged(place, request)
            except CallFailed as failure:
                failures.append(failure)
                if not failure.retry or len(failures) > self._settings.max_retries:
                    raise
                if not self._retries.withdraw():
                    self._metrics.retries_refused.inc()
                    raise
            self._metrics.retries.inc()
            asked_s = failures[-1].retry_after_s
            number = len(failures) - 1
            await asyncio.sleep(backoff_s(number, self._settings.backoff_s, _LONGEST_BACKOFF_S, asked_s, self._draw))

    async def _hedged(self, place: Place, request: ChatRequest) -> Answer:
        """The answer of one call, or of a second one where the first is late: of whichever answers first."""
        first = self._begin(place, request)
        calls = [first]
        try:
            delay_s = self._hedges.delay_s
            if delay_s is not None and not (await asyncio.wait(calls, timeout=delay_s))[0]:
                second = self._second_place(place.server)
                if second is not None:
                    calls.append(self._begin(second, request))
            answer, winner = await _first_answer(calls)
            if len(calls) == 2:
                self._metrics.hedges.labels(outcome="lost" if winner is first else "won").inc()
            return answer
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _second_place(self, avoid: Server) -> Place | None:
        place = self._servers.place_now(avoid)
        if place is not None and not self._hedges.take():
            self._servers.leave(place, counts=False)
            return None
        return place

    def _begin(self, place: Place, request: ChatRequest) -> asyncio.Task[Answer]:
        """One HTTP call, of whose end limiter, breaker, hedges and metrics hear, even if it never began."""
        call = asyncio.create_task(self._call(place.server.url, request))
        began = time.monotonic()
        call.add_done_callback(lambda _: self._ended(place, call, time.monotonic() - began))
        return call

    def _ended(self, place: Place, call: asyncio.Task[Answer], seconds: float) -> None:
        url, failure = place.server.url, None if call.cancelled() else call.exception()
        known = failure if isinstance(failure, CallFailed) else None
        outcome = "cancelled" if call.cancelled() else known.outcome if known else "bug" if failure else "ok"
        self._metrics.calls.labels(server=url, outcome=outcome).inc()
        self._servers.leave(place, known, counts=outcome not in ("cancelled", "bug"))
        if outcome == "ok":
            self._hedges.observe(seconds)
            self._metrics.call_seconds.labels(server=url).observe(seconds)
            self._metrics.tokens.labels(kind="prompt").inc(call.result().prompt_tokens)
            self._metrics.tokens.labels(kind="completion").inc(call.result().completion_tokens)

    async def _call(self, url: str, request: ChatRequest) -> Answer:
        try:
            reply = await http_client.post(self._session, f"{url}/chat/completions", request.body)
        except aiohttp.ClientError as error:
            raise of_transport(url, self._settings, error) from error
        except TimeoutError:
            raise too_late(url, self._settings) from None
        except http_client.TooLong as error:
            raise unreadable(url, str(error), "") from None
        if reply.status != 200:
            raise of_status(url, self._settings, reply)
        try:
            return read_answer(reply.body)
        except ValueError as error:
            raise unreadable(url, str(error), reply.headers.get("Content-Type", "")) from error


async def _first_answer(calls: list[asyncio.Task[Answer]]) -> tuple[Answer, asyncio.Task[Answer]]:
    """Of the first call that is answered; where all fail, raises what the first of them raised."""
    pending = set(calls)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            if call.exception() is None:
                return call.result(), call
    return calls[0].result(), calls[0]
