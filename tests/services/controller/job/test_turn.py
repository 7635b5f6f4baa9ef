"""Turns of jobs at the replicas of a pool: which commands start, and when the next job has the turn. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.spec import parse_job
from services.controller.fleet.turns import Turns
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import (
    Command,
    EnsureTrainer,
    Generate,
    Publish,
    Score,
    TrainStep,
    Validate,
)
from services.controller.job.machine.state_machine import Machine
from services.controller.job.turn import Turn


def machine_of(max_staleness: int = 1, **trainer: Any) -> Machine:
    job = {
        "model": {"path": "m"},
        "rewards": {"ocr": {}},
        "data": {"train": "t.txt"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "batch_size": 2},
        "schedule": {"max_staleness": max_staleness},
        "trainer": trainer,
    }
    machine = Machine(parse_job(job))
    machine.apply(ev.TrainerReady(version=0))
    return machine


class Jobs:
    """Jobs of one pool, and those that were called because they have the turn."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.turns, self.told = Turns(), list[str]()
        self.machines = {name: machine_of(**settings) for name in names}
        self._turns = {
            name: Turn(self.turns, name, machine, lambda name=name: self.told.append(name))  # type: ignore[misc]
            for name, machine in self.machines.items()
        }

    def start(self, name: str, running: set[Command] | None = None) -> set[Command]:
        return self._turns[name].startable(self.machines[name].commands(), running or set())

    def apply(self, name: str, *events: ev.Event) -> None:
        for event in events:
            self.machines[name].apply(event)


def sampled(step: int, version: int) -> list[ev.Event]:
    return [ev.Sampled(step=step, group=0, index=index, version=version) for index in range(2)]


def test_a_job_alone_starts_whatever_it_wants() -> None:
    jobs = Jobs("a")
    assert jobs.start("a") == {Publish(0)}
    jobs.apply("a", ev.Published(version=0))
    assert jobs.start("a") == {Generate(0, (0,)), Generate(1, (0,))}


def test_weights_are_published_before_or_after_an_update_not_during_it() -> None:
    jobs = Jobs("a")
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0), *sampled(0, 0), ev.ReplicaBehind())
    assert Publish(0) in jobs.start("a", {Generate(1, (0,))})
    assert Publish(0) not in jobs.start("a", {Generate(1, (0,)), TrainStep(0)})


def test_the_second_waits_and_is_told_when_the_first_has_sampled_a_step() -> None:
    jobs = Jobs("a", "b")
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0))
    assert jobs.start("b") == set()
    assert jobs.start("a") == {Generate(0, (0,))}  # step 1 waits: somebody else does
    jobs.apply("a", *sampled(0, 0))
    assert jobs.start("a", {Generate(0, (0,))}) & {Generate(1, (0,))} == set()  # it has not ended yet
    assert jobs.told == []
    assert Generate(1, (0,)) not in jobs.start("a")
    assert jobs.told == ["b"]
    assert jobs.start("b") == {Publish(0)}
    assert Generate(1, (0,)) not in jobs.start("a")  # it asks again, behind b


def test_training_overlaps_with_the_turns_of_others() -> None:
    jobs = Jobs("a", "b", max_staleness=0)
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0), *sampled(0, 0))
    scored = [ev.Scored(step=0, group=0, index=index, score=float(index)) for index in range(2)]
    jobs.apply("a", *scored, ev.AdvantagesReady(step=0))
    jobs.start("b")
    assert jobs.start("a") == {TrainStep(0)}
    assert jobs.start("b") == {Publish(0)}


def test_a_job_that_trains_asks_for_the_turn_of_others_when_that_has_ended() -> None:
    jobs = Jobs("a", "b")
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0))
    jobs.start("b")
    jobs.start("a")
    jobs.apply("a", *sampled(0, 0))
    trains: set[Command] = {TrainStep(0)}
    for _ in range(2):
        assert jobs.start("a", trains) == {Score(0, 0)}
    jobs.start("b")
    jobs.apply("b", ev.Published(version=0))
    assert jobs.start("b") == {Generate(0, (0,)), Generate(1, (0,))}  # a does not wait yet
    jobs.start("a")
    assert jobs.start("b") == {Generate(0, (0,))}


def test_a_job_without_trainer_keeps_its_turn_only_while_nobody_else_waits() -> None:
    jobs = Jobs("a", "b")
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0), ev.TrainerLost())
    assert jobs.start("a") == {EnsureTrainer(), Generate(0, (0,)), Generate(1, (0,))}
    jobs.start("b")
    assert jobs.start("a") == {EnsureTrainer()}
    assert jobs.told == ["b"]


def test_a_paused_job_leaves_when_its_calls_have_ended() -> None:
    jobs = Jobs("a", "b")
    jobs.start("a")
    jobs.apply("a", ev.Published(version=0))
    jobs.start("b")
    jobs.apply("a", ev.PauseRequested())
    assert jobs.start("a", {Generate(0, (0,))}) == set()
    assert jobs.told == []
    assert jobs.start("a") == set()
    assert jobs.told == ["b"]


def test_a_trainer_that_makes_all_samples_waits_for_nobody() -> None:
    jobs = Jobs("a", "b", max_staleness=0, samples="only", mode="lora")
    assert jobs.start("a") == jobs.start("b") == {Publish(0)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_one_job_has_the_turn_and_all_get_it(moves: list[tuple[str, bool]]) -> None:
    turns, told = Turns(), list[str]()
    asked = list[str]()
    for name, takes in moves:
        if takes:
            if name not in asked:
                asked.append(name)
            assert turns.take("p", name, lambda name=name: told.append(name)) == (asked[0] == name)  # type: ignore[misc]
        else:
            goes_on = asked[:1] == [name] and len(asked) > 1
            asked = [known for known in asked if known != name]
            before = len(told)
            turns.leave("p", name)
            assert told[before:] == (asked[:1] if goes_on else [])
        assert [known for known in "abc" if turns.has("p", known)] == asked[:1]
        assert turns.is_wanted("p") == (len(asked) > 1)


@pytest.mark.parametrize("command", [Validate(0), Publish(0)])
def test_validations_and_publications_belong_to_the_turn(command: Command) -> None:
    turns = Turns()
    turn = Turn(turns, "a", machine_of(), lambda: None)
    turns.take("default", "b", lambda: None)
    assert turn.startable({command, TrainStep(0)}, set()) == {TrainStep(0)}
    turns.leave("default", "b")
    assert turn.startable({command, TrainStep(0)}, set()) == {command, TrainStep(0)}


def shared(turns: Turns, bases: dict[str, str]) -> None:
    for job, base in bases.items():
        turns.share(job, base, lambda: True)


def test_jobs_on_one_base_share_a_turn_until_another_base_waits() -> None:
    turns, told = Turns(), list[str]()
    shared(turns, {"a": "x", "b": "x", "c": "y", "d": "x", "full": ""})

    def take(job: str) -> bool:
        return turns.take("p", job, lambda: told.append(job))

    assert take("a")
    assert not turns.is_taken("p", "b")
    assert take("b")
    assert not turns.is_wanted("p")
    assert turns.is_shared("a")
    assert turns.is_taken("p", "c")
    assert not take("c")
    assert turns.is_wanted("p")
    assert not take("d")  # would let c starve
    assert not take("full")
    turns.leave("p", "a")
    assert not told
    turns.leave("p", "b")
    assert told == ["c"]
    assert not take("b")  # with d, after c
    turns.leave("p", "c")
    assert sorted(told) == ["b", "c", "d"]
    turns.leave("p", "d")
    turns.leave("p", "b")
    assert told[-1] == "full"


def test_jobs_share_no_turn_while_a_replica_of_their_pool_serves_one_job() -> None:
    turns, may = Turns(), [False]
    for job in ("a", "b"):
        turns.share(job, "x", lambda: may[0])
    assert turns.take("p", "a", lambda: None)
    assert not turns.take("p", "b", lambda: None)
    turns.leave("p", "b")
    turns.leave("p", "a")
    may[0] = True
    assert turns.take("p", "a", lambda: None)
    assert turns.take("p", "b", lambda: None)
