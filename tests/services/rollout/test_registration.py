"""What a replica's health says while its engine works, while Redis is unreachable, and once it is stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from flowfleet.data.replicas import ReplicaRecord
from flowfleet.rpc import endpoint as rpc
from services.rollout import registration
from services.rollout.registration import Membership
from tests.waiting import until

RECORD = ReplicaRecord("r0", "127.0.0.1:7000", "incarnation", "", "default")


class Engine:
    is_stuck = False


class Registry:
    """Redis as the membership uses it."""

    is_away = False

    def __init__(self) -> None:
        self.num_calls = self.num_renewals = 0
        self.is_taken = False

    def register_script(self, _: str) -> Any:
        return self._call

    async def _call(self, **_: Any) -> int:
        self.num_calls += 1
        if self.is_away:
            raise redis.ConnectionError("away")
        self.num_renewals += 1
        return 0 if self.is_taken else 1


class Health(rpc.HealthState):
    serving = False

    async def set_serving(self, serving: bool) -> None:
        self.serving = serving


async def test_only_a_stuck_engine_denies_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RENEW_EVERY_S", 0.001)
    engine, registry, health = Engine(), Registry(), Health()
    membership = Membership(registry, engine, health)  # type: ignore[arg-type]
    await membership.join(lambda: RECORD)
    await until(lambda: registry.num_renewals > 3)
    assert health.serving
    registry.is_away, seen = True, registry.num_calls
    await until(lambda: registry.num_calls > seen + 3)
    assert health.serving
    registry.is_away = False
    engine.is_stuck = True
    await until(lambda: not health.serving)
    renewals = registry.num_renewals
    await asyncio.sleep(0.02)
    assert registry.num_renewals == renewals  # its entry expires
    await membership._stop()


async def test_a_change_is_written_at_once_and_told_before_an_answer() -> None:
    registry = Registry()
    membership = Membership(registry, Engine(), Health())  # type: ignore[arg-type]
    membership.changed()
    await membership.tell()
    assert registry.num_renewals == 0  # it has not joined
    await membership.join(lambda: RECORD)
    for _ in range(3):
        membership.changed()
    await until(lambda: registry.num_renewals == 1 + 1)
    await membership.tell()
    assert registry.num_renewals == 1 + 1 + 1
    registry.is_away = True
    await membership.tell()
    await membership._stop()


async def test_one_that_was_replaced_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RENEW_EVERY_S", 0.001)
    registry, ended = Registry(), asyncio.Event()
    membership = Membership(registry, Engine(), Health(), ended.set)  # type: ignore[arg-type]
    await membership.join(lambda: RECORD)
    await asyncio.sleep(0.02)
    assert not ended.is_set()
    registry.is_taken = True
    async with asyncio.timeout(10):
        await ended.wait()
    await membership._stop()
