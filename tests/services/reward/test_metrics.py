from __future__ import annotations

import asyncio
import math

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.errors import InvalidRequest
from services.reward.metrics import RewardMetrics, score_buckets
from services.reward.scorer import Problem, Score


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RewardMetrics:
    return RewardMetrics("ocr", (0.0, 1.0), registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"flowfleet_reward_{name}", {"scorer": "ocr", **labels})


def test_a_batch_is_counted_by_samples_scores_and_reasons(metrics: RewardMetrics, registry: CollectorRegistry) -> None:
    metrics.observe_batch([Score(0.25), Score(1.0), Problem("prompt", ""), Problem("prompt", "")], 0.2)
    assert value(registry, "samples_total") == 4
    assert value(registry, "errors_total", reason="prompt") == 2
    assert value(registry, "batch_size_sum") == 4
    assert value(registry, "batch_seconds_sum") == 0.2
    assert value(registry, "score_count") == 2
    assert value(registry, "score_bucket", le="0.3") == 1


def test_requests_are_counted_by_code(metrics: RewardMetrics, registry: CollectorRegistry) -> None:
    with metrics.request():
        pass
    for error in (InvalidRequest("no"), RuntimeError("our mistake"), asyncio.CancelledError()):
        with pytest.raises(type(error)), metrics.request():
            raise error
    for code in ("OK", "INVALID_ARGUMENT", "INTERNAL", "CANCELLED"):
        assert value(registry, "requests_total", code=code) == 1
    assert value(registry, "request_seconds_count") == 4


def test_the_queue_is_read_when_asked(metrics: RewardMetrics, registry: CollectorRegistry) -> None:
    waiting = [3]
    metrics.watch_queue(lambda: waiting[0])
    assert value(registry, "queued_samples") == 3
    waiting[0] = 5
    assert value(registry, "queued_samples") == 5


def test_buckets_cover_the_range() -> None:
    assert score_buckets((0.0, 1.0)) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert score_buckets((0.0, math.inf))[:3] == [0.0, 1.0, 2.0]
    assert score_buckets((0.0, math.inf))[-1] == 4096.0
    assert score_buckets((-math.inf, 0.0)) == [-bound for bound in reversed(score_buckets((0.0, math.inf)))]
    assert len(score_buckets((-math.inf, math.inf))) == 27


def test_processes_are_counted(metrics: RewardMetrics, registry: CollectorRegistry) -> None:
    assert value(registry, "processes") == 0
    metrics.set_processes(4)
    for seconds in (0.5, 0.25):
        metrics.observe_busy(seconds)
    metrics.observe_death()
    assert [value(registry, name) for name in ("processes", "busy_seconds_total", "process_deaths_total")] == [
        4,
        0.75,
        1,
    ]
