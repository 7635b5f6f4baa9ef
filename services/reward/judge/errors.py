"""Why a call to a judge's server gave no answer; each message names the server and the setting to change."""

from __future__ import annotations

import re
from typing import Final

import aiohttp

from flowfleet.backoff import retry_after_s
from services.reward.judge.answers import error_message
from services.reward.judge.settings import JudgeSettings
from services.reward.remote.http_client import Reply, connect_complaint, tls_complaint

RETRIED_STATUS: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
CROWDED_STATUS: Final = frozenset({429, 503})
_NO_LOGPROBS: Final = re.compile(
    r"(?=.*logprob)(?!.*\b(max(imum)?|at most|less|greater|range|between|above|up to|limit)\b)"
    r".*\b(not (be )?(support|allow|permit|enabled|available|implement)|un(support|expect|known|recogni))",
    re.IGNORECASE,
)
"""Error of a server without log-probabilities; a server that gives too few names its limit."""
_LOGPROBS_HINT: Final = 'settings.top_logprobs, or logprobs = "never" for a server that has none'
_OTHER_MODEL: Final = "Server is pinned to"
"""Error 400 of `transformers serve`."""


class CallFailed(Exception):
    """`outcome` is a short name that metrics count by."""

    def __init__(
        self,
        outcome: str,
        message: str,
        *,
        retry: bool,
        retry_after_s: float | None = None,
        blames_server: bool = True,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry = retry
        """Another try may succeed."""
        self.retry_after_s = retry_after_s
        self.blames_server = blames_server
        """False where the question is at fault: the server is well."""

    @property
    def crowded(self) -> bool:
        """The server has too much to do."""
        return self.outcome in ("crowded", "timeout")


def of_status(url: str, settings: JudgeSettings, reply: Reply) -> CallFailed:
    """Returns the failure that a status other than 200 means."""
    status = reply.status
    said = f"{url} answered {status}: {error_message(reply.body) or reply.reason}"
    if status in CROWDED_STATUS:
        hint = "settings.max_concurrency bounds the calls at a time; or give it more replicas"
        after_s = retry_after_s(reply.headers.get("Retry-After"))
        return CallFailed("crowded", f"{said} ({hint})", retry=True, retry_after_s=after_s, blames_server=status == 503)
    if status in RETRIED_STATUS:
        return CallFailed("server_error", f"{said} (its log has the reason; settings.urls names it)", retry=True)
    if status in (400, 403, 422) and _NO_LOGPROBS.match(said):
        return CallFailed("no_logprobs", f"{said} ({_LOGPROBS_HINT})", retry=False, blames_server=False)
    if status in (401, 403):
        hint = "settings.api_key_env names the environment variable with the key"
        return CallFailed("unauthorized", f"{said} ({hint})", retry=False)
    if status in (404, 405) or (status == 400 and _OTHER_MODEL in said):
        hint = f"settings.model is {settings.model!r}, settings.urls must end with the version, as /v1"
        return CallFailed("not_found", f"{said} ({hint})", retry=False)
    if 300 <= status < 400:
        hint = f"it points to {reply.headers.get('Location', 'nowhere')}: settings.urls must name the server itself"
        return CallFailed("redirected", f"{said} ({hint})", retry=False)
    if status >= 500:
        return CallFailed("server_error", f"{said} (settings.urls names it)", retry=False)
    return CallFailed("refused", f"{said} ({_hint_for(reply.body)})", retry=False, blames_server=False)


def _hint_for(body: bytes) -> str:
    text = body.decode("utf-8", "replace").lower()
    if "logprob" in text:
        return _LOGPROBS_HINT
    if "image" in text or "multimodal" in text or "multi-modal" in text:
        return "vLLM: --limit-mm-per-prompt must allow the rubric's pictures"
    return "settings.rubric and settings.extra make the request"


def of_transport(url: str, error: aiohttp.ClientError) -> CallFailed:
    """Returns the failure of a call whose connection failed before a whole answer arrived."""
    cause = tls_complaint(error)
    if cause is not None:
        hint = "settings.ca must be the CA of the server, settings.urls its name, and https:// only where it speaks TLS"
        return CallFailed("tls", f"{url}: no TLS: {cause} ({hint})", retry=False)
    why = connect_complaint(error)
    if why is not None:
        message = f"{url}: cannot connect: {why} (is it up? settings.urls says where it is)"
        return CallFailed("connect", message, retry=True)
    hint = "settings.urls: is it an OpenAI-compatible server, and https:// where it speaks TLS?"
    return CallFailed("broken", f"{url}: the connection broke: {error or type(error).__name__} ({hint})", retry=True)


def too_late(url: str, settings: JudgeSettings) -> CallFailed:
    hint = f"settings.timeout_s = {settings.timeout_s:g}, max_concurrency = {settings.max_concurrency}"
    return CallFailed("timeout", f"{url} gave no whole answer in {settings.timeout_s:g} s ({hint})", retry=True)


def unreadable(url: str, why: str, content_type: str) -> CallFailed:
    """Problem of an answer with status 200 that is not a chat completion."""
    message = f"{url} answered no chat completion ({content_type or 'no content type'}): {why}"
    return CallFailed("unreadable", f"{message} (settings.urls: is it an OpenAI-compatible server's /v1?)", retry=True)
