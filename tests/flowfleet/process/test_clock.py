"""Ages that a wall clock which jumps does not change."""

from __future__ import annotations

import time

import pytest

from flowfleet.process.clock import steady_time


@pytest.mark.parametrize("jump_s", [24 * 3600, -24 * 3600])
def test_the_wall_clock_at_the_start_and_the_monotonic_clock_since(
    monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    before, now = steady_time(), time.time()
    assert abs(before - now) < 60
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    assert 0 <= steady_time() - before < 60
