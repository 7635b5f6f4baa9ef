"""`http`: scores come from a server of others that speaks JSON (formats in `shapes`).

The samples of a call are asked in requests of `batch_size`, at most `concurrency` of them under way, over pooled
connections; media go as the bytes they came in. A request that fails for now (no connection, silence, status 408, 429,
5xx) is asked again after a random pause and what Retry-After asks for, while the budget of retries lasts. The answer to
a sample is its score, or a Problem that names the URL and the setting to change. Where the server fails on any request,
the call is UNAVAILABLE, and the scores that it got are kept until it is asked again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import Field, field_validator
from yarl import URL

from flowfleet.backoff import retry_after_s
from flowfleet.errors import Unavailable
from flowfleet.lru import LruCache
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from flowfleet.rewards.requests import EncodedSample
from services.reward.remote import http_client
from services.reward.remote.retries import ShareBudget, retry_s
from services.reward.remote.turns import Turns
from services.reward.scorer import AsyncScorer, Outcome, Problem, Score, ScorerSettings, read_params, score_range
from services.reward.scorers.http.shapes import BAD_ANSWER, SHAPES, BadAnswer

SERVER_FAILED, REFUSED = "server_failed", "refused"
MAX_KEPT = 8192
"""Scores of failed calls."""
MAX_PAUSE_S = 10.0
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
BLAMES_REQUEST = frozenset({400, 413, 415, 422})
"""Statuses caused by a request's content: while other requests succeed, the server is healthy."""

log = logging.getLogger(__name__)

Params = tuple[tuple[str, str], ...]


class HttpSettings(ScorerSettings):
    url: str
    """URL that requests are posted to, with its path."""
    shape: Literal["lists", "flow_grpo", "verl_omni", "flow_factory", "single"] = "lists"
    """Format of requests and answers."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of every body, such as only_strict = false."""
    batch_size: int = Field(default=8, ge=1, le=1024)
    """Maximum samples per request; 1 in the shape "single"."""
    concurrency: int = Field(default=64, ge=1, le=1024)
    """Maximum concurrent requests."""
    timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0)
    """Timeout of one request."""
    retries: int = Field(default=3, ge=0, le=20)
    """Maximum retries of one request."""
    retry_ratio: float = Field(default=0.2, ge=0.0, le=1.0)
    """Maximum ratio of retries to requests, after the first ten."""
    pause_s: float = Field(default=0.5, gt=0.0, le=60.0)
    """Maximum pause before the first retry; it doubles up to 10 s."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request, without secrets."""
    headers_from_env: dict[str, str] = Field(default_factory=dict)
    """Header to the environment variable that holds its value."""
    ca: Path | None = None
    """PEM file of the server's CA; unset: the machine's."""
    name: str = Field(default="http", min_length=1)
    """Name in Describe."""
    version: str = "1"
    """Version; change it whenever the server's model changes."""
    video: bool = False
    """Also accept videos."""
    score_min: float | None = None
    score_max: float | None = None
    """Bounds of the score; unset: none."""
    params: tuple[str, ...] = ()
    """Parameters that a job may set; they are sent along."""
    components: tuple[str, ...] = ()
    """Further fields of the answer to keep."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, text: str) -> str:
        url = URL(text)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"{text!r} is no address: write http://HOST:PORT/PATH or https://…")
        if url.user or url.password:
            raise ValueError("an address holds no password: name a header in headers_from_env")
        return text


class HttpScorer(AsyncScorer[Params]):
    """A server that the settings name."""

    def __init__(self, settings: HttpSettings) -> None:
        """ValueError for a header whose environment variable is empty, and a `ca` that cannot be read."""
        self._settings = settings
        self._shape = SHAPES[settings.shape]
        self._size = 1 if self._shape.single else settings.batch_size
        self.name = settings.name
        self.version = settings.version
        self.modalities = (MODALITY_IMAGE, MODALITY_VIDEO) if settings.video else (MODALITY_IMAGE,)
        self.score_range = score_range(settings.score_min, settings.score_max)
        self.components = settings.components
        self._headers = {**settings.headers, **_secrets(settings)}
        self._tls = _tls(settings)
        self._retries = ShareBudget(settings.retry_ratio)
        self._draw = random.Random()
        self._kept: LruCache[bytes, Score] = LruCache(MAX_KEPT)
        self._turns = Turns()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession

    async def start(self) -> None:
        self._session = http_client.open_session(self._tls, self._settings.timeout_s, self._headers)

    async def close(self) -> None:
        await self._session.close()

    def parse(self, params: Mapping[str, str]) -> Params:
        return tuple(sorted(read_params(params, dict.fromkeys(self._settings.params, str)).items()))

    async def score(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """Returns one outcome per sample, in order. Raises Unavailable if the server failed on any, or refused all."""
        known = [self._kept.pop(_key(sample, params)) for sample in samples] if len(self._kept) else []
        unknown = [place for place in range(len(samples)) if not known or known[place] is None]
        asked = iter(await self._ask_all([samples[place] for place in unknown], params))
        outcomes: list[Outcome] = [(known[place] if known else None) or next(asked) for place in range(len(samples))]
        problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
        failed = next((problem for problem in problems if problem.reason == SERVER_FAILED), None)
        refused = next((problem for problem in problems if problem.reason == REFUSED), None)
        if failed or (refused and not any(isinstance(outcome, Score) for outcome in outcomes)):
            self._keep(samples, params, outcomes)
            raise Unavailable((failed or problems[0]).message)
        return outcomes

    def _keep(self, samples: Sequence[EncodedSample], params: Params, outcomes: Sequence[Outcome]) -> None:
        """So that the call's next try asks only for what it lacks."""
        for sample, outcome in zip(samples, outcomes, strict=True):
            if isinstance(outcome, Score):
                self._kept.put(_key(sample, params), outcome)

    async def _ask_all(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """In requests of `batch_size`."""
        parts = [samples[start : start + self._size] for start in range(0, len(samples), self._size)]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(part, dict(params))) for part in parts]
        return [outcome for part in asked for outcome in part.result()]

    async def _ask(self, samples: Sequence[EncodedSample], params: Mapping[str, str]) -> list[Outcome]:
        """Sends one request, and retries it if it fails."""
        self._retries.deposit()
        for attempt in range(self._settings.retries + 1):
            try:
                return await self._request(samples, params)
            except _Failed as failed:
                if not failed.again or attempt == self._settings.retries or not self._retries.withdraw():
                    log.warning("%s", failed)
                    return [Problem(failed.reason, str(failed))] * len(samples)
                log.info("retrying: %s", failed)
                asked_s = failed.retry_after_s
                await asyncio.sleep(retry_s(attempt, self._settings.pause_s, MAX_PAUSE_S, asked_s, self._draw))
        raise AssertionError("the last attempt returns")

    async def _request(self, samples: Sequence[EncodedSample], params: Mapping[str, str]) -> list[Outcome]:
        """Raises _Failed."""
        settings = self._settings
        async with self._slots:
            await self._turns.take()
            body = self._shape.body(samples, params, settings.extra)
            try:
                reply = await http_client.post(self._session, settings.url, body)
            except aiohttp.ClientError as error:
                raise self._failed(_transport(error), again=True) from None
            except TimeoutError:
                why = f"had not answered after {settings.timeout_s:g} s: raise settings.timeout_s, or lower "
                raise self._failed(why + "settings.concurrency or settings.batch_size", again=True) from None
            except http_client.TooLong as error:
                raise self._failed(f"answered {error}: is settings.url the reward's?") from None
        if reply.status != 200:
            reason = REFUSED if reply.status in BLAMES_REQUEST else SERVER_FAILED
            asked_s = retry_after_s(reply.headers.get("Retry-After"))
            raise self._failed(_status(reply), again=reply.status in RETRIED, reason=reason, asked_s=asked_s)
        return self._read(reply.body, len(samples))

    def _read(self, answer: bytes, number: int) -> list[Outcome]:
        settings = self._settings
        try:
            outcomes = self._shape.outcomes(json.loads(answer), number, settings.components)
        except BadAnswer as error:
            raise self._failed(f"answered {error}: settings.shape is {settings.shape!r}, is that its shape?") from None
        except (ValueError, RecursionError):
            hint = "it looks pickled, which is never read here" if answer[:1] == b"\x80" else f"{answer[:80]!r}"
            raise self._failed(
                f"answered no JSON ({hint}): is settings.url the reward's, and its shape JSON?"
            ) from None
        return [
            Problem(BAD_ANSWER, f"settings.url {settings.url} gave {outcome.message}")
            if isinstance(outcome, Problem)
            else outcome
            for outcome in outcomes
        ]

    def _failed(
        self, why: str, again: bool = False, reason: str = SERVER_FAILED, asked_s: float | None = None
    ) -> _Failed:
        return _Failed(f"settings.url {self._settings.url} {why}", again, reason, asked_s)


class _Failed(Exception):
    """A request without an answer to use; `again`: the same may work later, after what the server asked for; `reason`:
    of the samples' problems."""

    def __init__(self, message: str, again: bool, reason: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.again = again
        self.reason = reason
        self.retry_after_s = retry_after_s


def _key(sample: EncodedSample, params: Params) -> bytes:
    """Equal for equal questions."""
    about = (sample.media_type, sample.prompt, sorted(sample.metadata.items()), params)
    return hashlib.sha256(hashlib.sha256(sample.media).digest() + repr(about).encode()).digest()


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> HttpScorer:
    return HttpScorer(HttpSettings.read(settings))


def _secrets(settings: HttpSettings) -> dict[str, str]:
    values = {header: os.environ.get(variable, "").strip() for header, variable in settings.headers_from_env.items()}
    if missing := [settings.headers_from_env[header] for header, value in values.items() if not value]:
        raise ValueError(f"settings.headers_from_env: the environment variable {missing[0]} is not set")
    return values


def _tls(settings: HttpSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"settings.ca {settings.ca} cannot be read as PEM: {error}") from None


def _transport(error: aiohttp.ClientError) -> str:
    tls, why = http_client.tls_complaint(error), http_client.connect_complaint(error)
    if tls is not None and "CERTIFICATE" in tls:
        return f"shows a certificate that is not trusted ({tls}): set settings.ca to its authority"
    if tls is not None or why == http_client.CUT_OFF:
        return f"does not speak TLS as asked ({tls or why}): is it http:// instead of https://?"
    if why is not None:
        return f"cannot be reached ({why}): check the address, and that the server runs"
    return f"broke the connection ({type(error).__name__}: {error})"


def _status(reply: http_client.Reply) -> str:
    status = reply.status
    hints = {
        401: "set settings.headers_from_env",
        403: "set settings.headers_from_env",
        413: "lower settings.batch_size",
    }
    hints |= {404: "check the path of settings.url", 405: "check the path of settings.url"}
    hints |= {400: "check settings.shape", 415: "check settings.shape", 422: "check settings.shape"}
    hints |= {
        429: "lower settings.concurrency",
        301: "name the address it points to",
        302: "name the address it points to",
    }
    text = reply.body[:200].decode("utf-8", "replace").strip().replace("\n", " ")
    return f"answered status {status}{': ' + hints[status] if status in hints else ''} ({text or 'no text'})"
