"""Asks a judge: the thin driver that puts the state machines of this package around HTTP.

A question waits for a place at a server, is sent, and is retried after a failure, all within `deadline_s`. Cancelling
it closes the connection, so that vLLM stops computing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from typing import Final

import aiohttp

from flowfleet.lru import LruCache
from services.reward.judge.answers import Answer, read_answer
from services.reward.judge.calls.servers import Place, Server, Servers
from services.reward.judge.errors import CallFailed, of_status, of_transport, too_late, unreadable
from services.reward.judge.messages import ChatRequest
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import JudgeSettings
from services.reward.remote import http_client
from services.reward.remote.retries import ShareBudget, retry_s

_LONGEST_BACKOFF_S: Final = 10.0

log = logging.getLogger(__name__)


class JudgeClient:
    """Client for one event loop: `start` it there before the first question, `close` it at the end."""

    def __init__(self, settings: JudgeSettings, metrics: JudgeMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._servers = Servers(settings, metrics)
        self._retries = ShareBudget(settings.retry_share)
        self._cache: LruCache[bytes, Answer] = LruCache(settings.cache_size)
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
        """Caches an answer for the next such request."""
        self._cache.put(request.key, answer)

    async def ask(self, request: ChatRequest) -> Answer:
        """The answer to a question. Raises CallFailed with the reason of the last try."""
        failures: list[CallFailed] = []
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await self._ask(request, failures)
        except TimeoutError:
            last = f"; last: {failures[-1]}" if failures else ""
            message = f"no answer of {', '.join(self._settings.urls)} within settings.deadline_s = "
            raise CallFailed("timeout", f"{message}{self._settings.deadline_s:g}{last}", retry=False) from None

    async def _ask(self, request: ChatRequest, failures: list[CallFailed]) -> Answer:
        """Tries until it is answered, or a failure is final, or the budget is spent."""
        self._retries.deposit()
        avoid: Server | None = None
        while True:
            place = await self._servers.place(avoid)
            avoid = place.server
            try:
                return await self._call(place, request)
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
            await asyncio.sleep(retry_s(number, self._settings.backoff_s, _LONGEST_BACKOFF_S, asked_s, self._draw))

    async def _call(self, place: Place, request: ChatRequest) -> Answer:
        """Makes one HTTP call and reports its end to limiter, breaker and metrics."""
        url, failure, outcome = place.server.url, None, "cancelled"
        began = time.monotonic()
        try:
            answer = await self._answer(place.server, request)
            outcome = "ok"
        except CallFailed as known:
            failure, outcome = known, known.outcome
            raise
        except Exception:
            outcome = "bug"
            raise
        finally:
            self._metrics.calls.labels(server=url, outcome=outcome).inc()
            self._servers.leave(place, failure, counts=outcome not in ("cancelled", "bug"))
        seconds = time.monotonic() - began
        self._metrics.call_seconds.labels(server=url).observe(seconds)
        self._metrics.tokens.labels(kind="prompt").inc(answer.prompt_tokens)
        self._metrics.tokens.labels(kind="completion").inc(answer.completion_tokens)
        return answer

    async def _answer(self, server: Server, request: ChatRequest) -> Answer:
        """A server that refuses log-probabilities is asked without them, at once and from then on."""
        bare = request.without_logprobs()
        if request.top_logprobs is None or server.refuses_logprobs:
            return await self._post(server.url, bare)
        try:
            return await self._post(server.url, request)
        except CallFailed as failure:
            if failure.outcome != "no_logprobs":
                raise
            answer = await self._post(server.url, bare)
            if not server.refuses_logprobs:
                log.warning("%s; requests continue without it, scores come from the answer's text", failure)
            server.refuses_logprobs = True
            return answer

    async def _post(self, url: str, request: ChatRequest) -> Answer:
        try:
            reply = await http_client.post(self._session, f"{url}/chat/completions", request.body)
        except aiohttp.ClientError as error:
            raise of_transport(url, error) from error
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
