"""Deletion costs are set at once for new pods, else only after large changes, and for few pods at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flowfleet.errors import NotFound, Unavailable
from services.controller.fleet.replicas import Replica
from services.controller.platforms.kubernetes import deletion_cost
from services.controller.platforms.kubernetes.deletion_cost import PODS_A_LOOK, DeletionCosts, cost, keep_deletion_costs
from tests.waiting import until


def fleet(**outstanding: int) -> list[Replica]:
    return [Replica(name, "10.0.0.1:7000", outstanding=number) for name, number in outstanding.items()]


def test_idle_pods_cost_nothing_and_busier_ones_never_less() -> None:
    costs = [cost(outstanding) for outstanding in range(200)]
    assert costs[0] == 0 < costs[1]
    assert costs == sorted(costs)
    assert len(set(costs)) < 10


def test_each_pod_is_told_once_and_again_when_it_changes() -> None:
    costs = DeletionCosts()
    first = list(costs.due(fleet(a=0, b=24)))
    assert first == [("b", cost(24)), ("a", 0)]
    for told in first:
        costs.told(*told)
    assert list(costs.due(fleet(a=0, b=25))) == []  # the same power of two
    assert list(costs.due(fleet(a=0, b=0))) == [("b", 0)]
    assert list(costs.due(fleet(a=0))) == []
    assert list(costs.due(fleet(a=0, b=0))) == [("b", 0)]  # a new pod of that name


def test_few_are_told_at_a_time() -> None:
    names = [f"pod-{number}" for number in range(3 * PODS_A_LOOK)]
    costs, told = DeletionCosts(), set()
    for _ in range(3):
        due = list(costs.due(fleet(**dict.fromkeys(names, 1))))
        assert len(due) == PODS_A_LOOK
        for name, number in due:
            costs.told(name, number)
            told.add(name)
    assert told == set(names)


async def test_only_the_leader_tells_and_goes_on_after_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_cost, "LOOK_S", 0.01)
    runner: Any = SimpleNamespace(leads=False, fleet_view=lambda: fleet(gone=1, there=2))
    faults = [Unavailable("busy"), NotFound("no such pod")]
    told: list[tuple[str, int]] = []

    async def set_cost(name: str, number: int) -> None:
        if faults:
            raise faults.pop(0)
        told.append((name, number))

    async with asyncio.timeout(10):
        task = asyncio.create_task(keep_deletion_costs(runner, set_cost))
        await asyncio.sleep(0.1)
        assert told == []
        runner.leads = True
        await until(lambda: told)
        await asyncio.sleep(0.1)
        task.cancel()
    assert told == [("gone", cost(1))]  # "there" was the one that was not found
