from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from prometheus_client import CollectorRegistry

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
