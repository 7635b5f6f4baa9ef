"""A server's chat completion as text and token probabilities, and all that can be wrong with it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_LOG_PROB = 1e-3
"""Rounding may lift a log-probability a little above 0."""
SHOWN = 120
"""Characters of an answer in a message."""


@dataclass(frozen=True)
class Token:
    """A token of the answer. `top` has the likeliest tokens in its place with their log-probabilities (natural)."""

    text: str
    log_prob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """Answer of the model; `tokens` is empty where the server gave no log-probabilities."""

    text: str
    tokens: tuple[Token, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    """It ended at max_tokens."""

    @property
    def shown(self) -> str:
        """Its beginning, quoted, for messages."""
        text = self.text if len(self.text) <= SHOWN else self.text[:SHOWN] + "…"
        return repr(text) + (" (cut off at max_tokens)" if self.truncated else "")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class _Top(_Model):
    token: str
    logprob: float


class _Token(_Top):
    top_logprobs: tuple[_Top, ...] = ()


class _LogProbs(_Model):
    content: tuple[_Token, ...] | None = None


class _Message(_Model):
    content: str | None = None


class _Choice(_Model):
    message: _Message
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None


class _Usage(_Model):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Completion(_Model):
    choices: Annotated[tuple[_Choice, ...], Field(min_length=1)]
    usage: _Usage | None = None


def read_answer(body: bytes) -> Answer:
    """The answer in the JSON of a chat completion. ValueError says what is wrong with it."""
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None
    choice = completion.choices[0]
    if choice.message.content is None:
        raise ValueError("choices.0.message.content is null: the model gave no text")
    found = choice.logprobs.content if choice.logprobs and choice.logprobs.content else ()
    usage = completion.usage or _Usage()
    return Answer(
        choice.message.content,
        tuple(_token(token) for token in found),
        usage.prompt_tokens,
        usage.completion_tokens or 0,
        choice.finish_reason == "length",
    )


def _token(token: _Token) -> Token:
    top = tuple((other.token, other.logprob) for other in token.top_logprobs)
    for value in (token.logprob, *(value for _, value in top)):
        if math.isnan(value) or value > MAX_LOG_PROB:
            raise ValueError(f"choices.0.logprobs holds {value}, which is no log-probability")
    return Token(token.token, token.logprob, top)


def error_message(body: bytes) -> str:
    """Returns a server's error message, shortened: `error.message`, as of OpenAI and vLLM, else the text itself."""
    text = body.decode("utf-8", "replace").strip()
    try:
        read: Any = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        inner = read.get("error")
        found = inner.get("message") if isinstance(inner, dict) else inner or read.get("message") or read.get("detail")
        text = str(found) if found else text
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:300] + "…"
