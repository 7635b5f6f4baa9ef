"""A schedule comes from its seed alone, and strikes everything equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.faults.schedule import KINDS, OWN_PHASE, PHASES, TARGETS, Shape, make_schedule, poisons

SHAPE = Shape(groups=2, group_size=3)


def test_the_seed_decides() -> None:
    assert make_schedule(100, 7, SHAPE) == make_schedule(100, 7, SHAPE)
    assert make_schedule(100, 7, SHAPE) != make_schedule(100, 8, SHAPE)


def test_a_longer_schedule_begins_with_the_shorter_one() -> None:
    assert make_schedule(100, 3, SHAPE)[:12] == make_schedule(12, 3, SHAPE)


@pytest.mark.parametrize("seed", range(20))
def test_of_a_hundred_faults_each_kind_has_six_at_least(seed: int) -> None:
    schedule = make_schedule(100, seed, SHAPE)
    kinds = Counter(fault.kind for fault in schedule)
    assert set(kinds) == set(KINDS)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert min(kinds.values()) >= 6
    for kind, targets in TARGETS.items():
        struck = Counter(fault.target for fault in schedule if fault.kind == kind)
        assert set(struck) <= set(targets)
        assert max(struck.values()) - min(struck[target] for target in targets) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_spread_over_the_phases_of_a_step(seed: int) -> None:
    phases = Counter(fault.phase for fault in make_schedule(100, seed, SHAPE))
    assert set(phases) == set(PHASES)
    assert min(phases.values()) >= 8
    assert all(
        fault.phase == OWN_PHASE[fault.kind] for fault in make_schedule(100, seed, SHAPE) if fault.kind in OWN_PHASE
    )


def test_steps_ascend_and_the_job_is_long_enough() -> None:
    schedule = make_schedule(100, 1, SHAPE)
    assert all(after.step - before.step == SHAPE.spacing for before, after in pairwise(schedule))
    assert schedule[-1].step < SHAPE.steps_for(100) - 1


def test_each_poison_is_for_a_sample_of_its_own_in_its_own_step() -> None:
    schedule = make_schedule(200, 5, SHAPE)
    poisoned = [fault for fault in schedule if fault.kind == "poison-reward"]
    assert len(poisons(schedule)) == len(poisoned)
    for fault in poisoned:
        step, group, index = map(int, fault.sample.split("/"))
        assert step == fault.step
        assert group < SHAPE.groups
        assert index < SHAPE.group_size


def test_only_the_kinds_that_were_asked_for() -> None:
    assert {fault.kind for fault in make_schedule(50, 1, SHAPE, ("kill", "stop"))} == {"kill", "stop"}
    with pytest.raises(ValueError, match="there is no fault 'burn'"):
        make_schedule(1, 1, SHAPE, ("burn",))
