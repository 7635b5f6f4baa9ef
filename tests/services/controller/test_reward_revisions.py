"""Rewards that change while a job runs: each step has one set of them from its first sample to its last."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.rewards.changes import RewardSet, ShadowPart
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import Command, ComputeAdvantages, Score
from services.controller.job.machine.events import event_from_json, event_to_json
from services.controller.job.machine.state import State, Status
from services.controller.job.machine.state_machine import Machine
from tests.services.controller.job.machine.test_state_machine import World, finish_step, make_spec, ready


def rewards(weight: float, **shadows: str) -> RewardSet:
    parts = {name: ShadowPart.model_validate({"beside": beside}) for name, beside in shadows.items()}
    return RewardSet.model_validate({"rewards": {"ocr": {"weight": weight}}, "shadows": parts})


def changed(number: int) -> ev.RewardsChanged:
    """The weight tells the revision."""
    return ev.RewardsChanged(number=number, set=rewards(1.0 + number))


class ChangingWorld(World):
    """Somebody changes the rewards all the time; what scored each step, and when it was opened, is written down."""

    number = 0

    def __init__(self, staleness: int, rng: random.Random, mishaps: float) -> None:
        super().__init__(make_spec(schedule={"steps": 5, "max_staleness": staleness}), rng, mishaps)
        self.scored_with: dict[int, set[float]] = {}
        self.opened_with: dict[int, int] = {}

    def emit(self, event: ev.Event) -> None:
        before = set(self.machine.state.batches)
        super().emit(event)
        for step in set(self.machine.state.batches) - before:
            self.opened_with[step] = self.number

    def pause_and_change(self) -> None:
        """Changes rewards like the driver: nothing is being scored."""
        self.emit(ev.PauseRequested())
        self.number += 1
        first = self.machine.first_changed(unscored=True)
        self.emit(changed(self.number).model_copy(update={"unscored": True}))
        assert not self.scored_with.keys() & range(first, 99)
        self.opened_with |= {step: self.number for step in self.machine.state.batches if step >= first}
        self.emit(ev.ResumeRequested())

    def execute(self, command: Command) -> None:
        if self.rng.random() < 0.1:
            self.number += 1
            self.emit(changed(self.number))
            if self.rng.random() < 0.3:
                self.emit(changed(self.number))  # the controller died before it noted that it had done so
        if self.rng.random() < 0.05:
            self.pause_and_change()
        if command not in self.machine.commands():
            return
        step = command.step if isinstance(command, Score | ComputeAdvantages) else None
        weight = None if step is None else self.machine.rewards_at(step)["ocr"].weight
        super().execute(command)
        if step is not None and weight is not None and self.machine.state.batches[step].is_judged:
            self.scored_with.setdefault(step, set()).add(weight)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([0.0, 0.02, 0.15]))
def test_a_step_has_the_rewards_that_were_asked_for_when_it_was_opened(
    seed: int, staleness: int, mishaps: float
) -> None:
    world = ChangingWorld(staleness, random.Random(seed), mishaps)
    world.run()
    assert world.machine.state.status is Status.SUCCEEDED
    assert world.first_applied == list(range(5))  # every step once, in order
    assert world.scored_with == {step: {1.0 + world.opened_with[step]} for step in range(5)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_folding_the_ledger_gives_the_same_revisions(seed: int, staleness: int) -> None:
    world = ChangingWorld(staleness, random.Random(seed), 0.1)
    world.run()
    again = Machine(world.spec)
    for entry in world.ledger:
        again.apply(event_from_json(entry))
    assert again.state.revisions == world.machine.state.revisions


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_change_counts_from_the_first_step_that_is_not_open(staleness: int) -> None:
    machine = ready(make_spec(schedule={"steps": 9, "max_staleness": staleness}))
    event = ev.RewardsChanged(number=1, set=rewards(7.0, ocr2="ocr"))
    machine.apply(event_from_json(event_to_json(event)))
    assert machine.first_unopened == staleness + 1
    at = [machine.rewards_at(step)["ocr"].weight for step in range(staleness + 3)]
    assert at == [1.0] * (staleness + 1) + [7.0] * 2
    assert machine.shadows_at(staleness) == {}
    assert machine.shadows_at(staleness + 1)["ocr2"].beside == "ocr"
    assert [machine.rewards_number_at(step) for step in (staleness, staleness + 1)] == [0, 1]
    snapshot = machine.state.model_dump_json()
    assert Machine(machine.spec, State.model_validate_json(snapshot)).state == machine.state


def paused(machine: Machine) -> None:
    machine.apply(ev.PauseRequested(reason="rewards.ocr: no such param"))


def scored(machine: Machine, step: int, **what: str) -> None:
    """One sample, or with `reason` dropped."""
    machine.apply(ev.Sampled(step=step, group=0, index=0, version=machine.state.version))
    place = {"step": step, "group": 0, "index": 0}
    machine.apply(ev.Dropped(**place, **what) if what else ev.Scored(**place, score=1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("judged", "first"), [(None, 0), (0, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("what", [{}, {"reason": "no_score_ocr"}])
def test_while_paused_a_change_counts_from_where_nothing_is_scored(
    judged: int | None, first: int, what: dict[str, str]
) -> None:
    machine = ready(make_spec(schedule={"steps": 9, "max_staleness": 2}))
    if judged is not None:
        scored(machine, judged, **what)
    machine.apply(changed(1))
    before = machine.state.batches
    paused(machine)
    change = ev.RewardsChanged(number=2, set=rewards(9.0), unscored=True)
    assert machine.first_changed(unscored=True) == first
    machine.apply(event_from_json(event_to_json(change)))
    at = [machine.rewards_at(step)["ocr"].weight for step in range(5)]
    assert at == [1.0] * first + [9.0] * (5 - first)
    assert [revision.number for revision in machine.state.revisions] == ([2] if first < 4 else [1, 2])
    assert machine.state.batches == before


def test_what_was_never_sampled_is_no_rewards_doing() -> None:
    machine = ready(make_spec())
    machine.apply(ev.Dropped(step=0, group=0, index=0, reason="rollout_failed"))
    paused(machine)
    assert machine.first_changed(unscored=True) == 0


def test_open_steps_change_only_while_paused() -> None:
    machine = ready(make_spec())
    machine.apply(changed(1).model_copy(update={"unscored": True}))
    assert [machine.rewards_at(step)["ocr"].weight for step in (0, 1)] == [1.0, 2.0]


def test_the_last_validation_can_still_be_put_right() -> None:
    spec = make_spec(schedule={"steps": 1}, data={"train": "t.txt", "validation": "v.txt"})
    machine = ready(spec)
    machine.state.version = machine.state.published = 1
    machine.state.batches = {}
    paused(machine)
    machine.apply(changed(1).model_copy(update={"unscored": True}))
    assert machine.rewards_at(1)["ocr"].weight == 2.0
    machine.apply(ev.Validated(version=1, reward=0.5))
    machine.apply(changed(2).model_copy(update={"unscored": True}))
    assert machine.rewards_at(1)["ocr"].weight == 2.0


def test_a_change_before_the_first_step_counts_from_it() -> None:
    machine = Machine(make_spec())
    machine.apply(changed(1))
    assert machine.rewards_at(0)["ocr"].weight == 2.0


def test_the_later_of_two_changes_between_steps_counts_and_an_old_number_changes_nothing() -> None:
    machine = ready(make_spec())
    for number in (1, 2, 1, 2):
        machine.apply(changed(number))
    assert machine.rewards_number == 2
    assert machine.rewards_at(1)["ocr"].weight == 3.0


def test_after_the_last_update_nothing_changes_any_more() -> None:
    world = World(make_spec(schedule={"steps": 1}), random.Random(1), 0.0)
    while world.machine.state.version == 0:
        world.execute(min(world.machine.commands(), key=str))
    world.emit(changed(1))
    assert world.machine.rewards_at(1)["ocr"].weight == 1.0


def test_what_no_step_has_any_more_is_not_kept() -> None:
    machine = ready(make_spec())
    machine.apply(changed(1))
    machine.apply(changed(2))
    finish_step(machine, 0)
    machine.apply(ev.Published(version=1))
    machine.apply(changed(3))
    assert [(r.number, r.from_step) for r in machine.state.revisions] == [(2, 1), (3, 2)]


def test_snapshots_from_before_rewards_could_change_are_read() -> None:
    state = State.model_validate_json(ready(make_spec()).state.model_dump_json(exclude={"revisions"}))
    assert state.revisions == []
    assert Machine(make_spec(), state).rewards_at(3)["ocr"].weight == 1.0
