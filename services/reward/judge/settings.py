"""Settings of the scorers `vlm` and `vlm_ocr`, as `--settings` and `--set` give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from services.reward.scorer import ScorerSettings

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]


class JudgeSettings(ScorerSettings):
    """Where the judge is and how it is asked."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """OpenAI-compatible servers of one model, as http://HOST:PORT/v1, separated by commas."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model there (vLLM: --served-model-name)."""
    api_key_env: str | None = None
    """Environment variable with the bearer token."""
    ca: Path | None = None
    """PEM file of the servers' CA; unset: the machine's."""
    deadline_s: Seconds = 60.0
    """Limit on one question, with waiting and retries."""
    timeout_s: Seconds = 30.0
    """Timeout of one call."""
    target_latency_s: Seconds = 10.0
    """Latency above which the limit of concurrent calls falls."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Initial concurrent calls per server."""
    max_concurrency: Annotated[int, Field(ge=1, le=1024)] = 256
    """Maximum concurrent calls per server."""
    max_retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Maximum retries per question."""
    retry_share: Share = 0.2
    """Maximum ratio of retries to questions."""
    backoff_s: Seconds = 0.2
    """Maximum pause before the first retry; it doubles with each."""
    breaker_failures: Annotated[int, Field(ge=1)] = 5
    """Consecutive failures that open a server's circuit breaker."""
    breaker_cooldown_s: Seconds = 5.0
    """Initial time that the breaker stays open; it doubles with each failed probe."""
    breaker_max_cooldown_s: Seconds = 60.0
    """Maximum time that the breaker stays open."""
    cache_size: Annotated[int, Field(ge=0, le=10_000_000)] = 20_000
    """Answers cached in memory, a few kB each."""
    max_parse_failures: Share = 0.1
    """Maximum share of unreadable answers among the latest 200; beyond it calls are UNAVAILABLE."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Temperature of the answer, not of token probabilities."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request, such as chat_template_kwargs."""

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")) or "?" in url:
                raise ValueError(f"{url!r} is no http://HOST:PORT/v1 or https://HOST:PORT/v1")
        stripped = tuple(url.rstrip("/") for url in urls)
        if len(set(stripped)) < len(stripped):
            raise ValueError("a server is named twice: name each once")
        return stripped

    @field_validator("extra")
    @classmethod
    def _has_no_own(cls, extra: dict[str, Any]) -> dict[str, Any]:
        own = {"model", "messages", "logprobs", "top_logprobs", "max_tokens", "temperature", "stream", "n"} & set(extra)
        if own:
            raise ValueError(f"{', '.join(sorted(own))} cannot be set here: other settings and the rubric say it")
        return extra

    @model_validator(mode="after")
    def _fits(self) -> JudgeSettings:
        if self.api_key_env is not None and not os.environ.get(self.api_key_env, "").strip():
            raise ValueError(f"settings.api_key_env: the environment variable {self.api_key_env} is not set")
        if self.ca is not None and not self.ca.is_file():
            raise ValueError(f"settings.ca: there is no file {self.ca}")
        if self.concurrency > self.max_concurrency:
            raise ValueError("settings.concurrency: must be at most max_concurrency")
        return self

    @property
    def api_key(self) -> str | None:
        """The key itself, from the environment."""
        return os.environ[self.api_key_env].strip() if self.api_key_env else None


class VlmSettings(JudgeSettings):
    """Settings of `vlm`."""

    rubric: str
    """Shipped rubric, or a TOML or YAML file."""
    logprobs: Literal["auto", "require", "never"] = "auto"
    """Use of token probabilities. "auto": where the server gives them. "require": an answer without them fails.
    "never": scores come from the text."""
    top_logprobs: Annotated[int, Field(ge=1, le=100)] = 20
    """Tokens asked for in each place; vLLM gives --max-logprobs (20)."""
    media_root: Path | None = None
    """Folder of the files that the metadata field `source` names."""
