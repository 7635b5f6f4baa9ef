"""A service at its thread limit, whose server cannot see that a call was cancelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from flowfleet.conformance import load
from flowfleet.conformance.checks import Fault


def session(refusals: float, code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED) -> Any:
    tries = [0]

    async def seconds(samples: Any) -> float:
        tries[0] += 1
        if tries[0] <= refusals:
            raise AioRpcError(code, Metadata(), Metadata(), "no thread is free")
        return 0.0

    options = SimpleNamespace(allowed_s=0.5)
    return SimpleNamespace(seconds=seconds, samples=lambda few: [], few=1, options=options, batch_s=0.0)


async def test_it_is_tried_again_for_the_allowed_time() -> None:
    assert load.AGAIN_S * 3 <= await load._timed(session(3)) < 0.5
    with pytest.raises(Fault, match=r"no thread is free.*: all of its threads have calls; give it more"):
        await load._timed(session(float("inf")))
    with pytest.raises(Fault, match="no thread is free"):
        await load._timed(session(1, grpc.StatusCode.INTERNAL))
