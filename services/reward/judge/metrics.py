"""Metrics of a judge: its servers and its answers."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from services.reward.judge.calls.breaker import BreakerState, CircuitBreaker
from services.reward.judge.calls.limiter import AimdLimiter

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BREAKER_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class JudgeMetrics:
    """Made once a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counted(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flowfleet_reward_judge_{name}", text, labels, registry=registry)

        def shown(name: str, text: str) -> Gauge:
            return Gauge(f"flowfleet_reward_judge_{name}", text, ["server"], registry=registry)

        self.calls = counted(
            "calls", "Calls to a judge's server by outcome: ok, cancelled, or why it failed", "server", "outcome"
        )
        self.call_seconds = Histogram(
            "flowfleet_reward_judge_call_seconds", "Answered calls", ["server"], buckets=SECONDS, registry=registry
        )
        self.retries = counted("retries", "Questions asked again after a failure")
        self.retries_refused = counted("retries_refused", "Retries that the budget refused")
        self.cache = counted("cache", "Questions by whether the answer was known: hit or miss", "outcome")
        self.answers = counted(
            "answers", "Answers by how they were read: logprobs, parsed from text, or failed", "outcome"
        )
        self.tokens = counted("tokens", "Prompt and completion tokens, as the servers count them", "kind")
        self._breaker = shown("breaker", "0 closed, 1 half open, 2 open: no calls")
        self._limit = shown("concurrency_limit", "Calls that a server may have at a time")
        self._in_flight = shown("in_flight", "Calls that a server has")

    def watch(self, server: str, limiter: AimdLimiter, breaker: CircuitBreaker) -> None:
        """Where a server's gauges are read from."""
        self._breaker.labels(server=server).set_function(lambda: BREAKER_NUMBERS[breaker.state])
        self._limit.labels(server=server).set_function(lambda: limiter.limit)
        self._in_flight.labels(server=server).set_function(lambda: limiter.in_flight)
