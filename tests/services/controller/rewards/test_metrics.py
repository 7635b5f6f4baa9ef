from __future__ import annotations

import asyncio
import contextlib
from contextlib import suppress

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.controller.rewards import metrics
from services.controller.rewards.metrics import RewardCalls


def remote(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, "OK"),
        (remote(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE"),
        (asyncio.CancelledError(), "CANCELLED"),
        (ValueError("no"), "INVALID_ARGUMENT"),
    ],
)
def test_each_call_counts_under_the_code_that_it_ends_with(error: BaseException | None, code: str) -> None:
    registry = CollectorRegistry()
    calls = RewardCalls(registry)
    with contextlib.suppress(BaseException), calls.call("ocr"):
        if error is not None:
            raise error
    assert registry.get_sample_value("flowfleet_reward_calls_total", {"reward": "ocr", "code": code}) == 1
    assert registry.get_sample_value("flowfleet_reward_call_seconds_count", {"reward": "ocr"}) == 1


def test_the_load_of_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call a second, which takes 1 … 10 s; the fifth fails, the sixth is cancelled."""
    now = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)  # type: ignore[attr-defined]
    calls = RewardCalls(CollectorRegistry())
    for number in range(1, 11):
        error = {5: TimeoutError(), 6: asyncio.CancelledError()}.get(number)
        with suppress(TimeoutError, asyncio.CancelledError), calls.call("ocr"):
            assert calls.load()["ocr"].in_flight == 1
            now += number
            if error:
                raise error
    load = calls.load()["ocr"]
    assert (load.in_flight, load.calls, load.failures) == (0, 9, 1)
    assert (load.latency_p50_s, load.latency_p99_s) == (5.0, 10.0)  # of 1 2 3 4 5 7 8 9 10
    now += metrics.RECENT_S - 12
    assert calls.load()["ocr"].calls == 2  # those that ended last
    now += 60
    assert calls.load() == {}
