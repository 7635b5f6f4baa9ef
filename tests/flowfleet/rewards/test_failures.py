"""Which words a caller finds for a reward that gives nothing."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from flowfleet.rewards.failures import of_call


@pytest.mark.parametrize(
    ("details", "is_reached"),
    [
        ("mine:score raised KeyError: 'tag' on all 8 samples; the log of scorer mine has more", True),
        ("mine:score gave a mapping of parts on all 8 samples", True),
        ("the service is draining: ask another replica, or try again", True),
        ("settings.url http://x cannot be reached (Cannot connect to host x:80)", True),
        ("failed to connect to all addresses; last error: ipv4:127.0.0.1:9: Connection refused", False),
        ("Socket closed", False),
        ("DNS resolution failed for x:7000", False),
        ("GOAWAY received", False),
        ("", False),
    ],
)
def test_a_service_that_speaks_is_reached(details: str, is_reached: bool) -> None:
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    said = of_call("a", "mine", "127.0.0.1:7", error, 300.0, "controller")
    start = "rewards.a: service 'mine' at 127.0.0.1:7"
    assert said.startswith(f"{start} gives nothing now: {details}" if is_reached else f"{start} cannot be reached (")
