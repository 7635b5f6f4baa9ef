"""Redis loses acknowledged writes: the driver stops, the trainer's weights are judged, foreign samples are refused."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from flowfleet.data.lineage import extend, follow, misfit
from flowfleet.proto import trainer_pb2
from flowfleet.redis import keys
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import (
    Checkpoint,
    Command,
    ComputeAdvantages,
    EnsureTrainer,
    Generate,
    Publish,
    TrainStep,
    Validate,
)
from services.controller.job.machine.events import event_from_json
from services.controller.job.machine.ledger import Ledger, RolledBack
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from services.controller.store.leadership import Lease
from tests.services.controller.job.machine.test_state_machine import World, finish_step, make_spec, ready

Request = trainer_pb2.TrainStepRequest


class RollingWorld(World):
    """`World` whose Redis goes back to any earlier moment. Requests differ each time that they are made, so the lost
    steps and those that replace them make other weights of the same versions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests: list[tuple[int, Request]] = []
        """In Redis, with the length of the ledger when they were stored."""
        self.history: dict[int, str] = {}
        """The trainer's."""
        self.saves: dict[int, dict[int, str]] = {0: {}}
        self.served_digest = ""
        self.in_flight: list[ev.Sampled] = []
        """From replicas that were asked before Redis went back."""
        self.rollbacks = 0

    def mishap(self) -> None:
        if self.rollbacks < 5 and self.rng.random() < 0.4:
            self.roll_back()
        else:
            super().mishap()
            if self.machine.state.trainer_version is None:  # it may have died: it has its newest checkpoint again
                self.resume(max(self.saves))

    def roll_back(self) -> None:
        self.rollbacks += 1
        length = self.rng.randint(0, len(self.ledger))
        self.ledger = self.ledger[:length]
        self.requests = [(at, request) for at, request in self.requests if at <= length]
        open_steps = list(self.machine.state.batches)
        if open_steps and self.served >= 0:
            step = self.rng.choice(open_steps)
            self.in_flight.append(
                ev.Sampled(step=step, group=0, index=0, version=self.served, digest=self.served_digest)
            )
        self.machine = Machine(self.spec)
        for entry in self.ledger:
            self.machine.apply(event_from_json(entry))
        if self.machine.state.status is Status.PAUSED:
            self.emit(ev.ResumeRequested())

    def resume(self, version: int) -> None:
        self.applied, self.history = version, dict(self.saves[version])

    def stored(self) -> dict[int, Request]:
        return {int(request.step): request for _, request in self.requests}

    def ours(self, version: int) -> str:
        """Lineage of a version as Redis tells it."""
        made: dict[int, str] = {}
        for step in range(version):
            extend(made, self.stored()[step])
        return made.get(version, "0")

    def execute(self, command: Command) -> None:
        state = self.machine.state
        if self.in_flight and self.rng.random() < 0.3:
            self.emit(self.in_flight.pop())
        match command:
            case EnsureTrainer():
                self.ensure_trainer()
            case Publish(version, evaluated) if self.applied == version:
                self.served, self.serves_evaluated = version, evaluated
                self.served_digest = self.history.get(version, "0")
                self.emit(ev.Published(version=version, evaluated=evaluated, digest=self.served_digest))
            case Generate(step, groups):
                if not (self.machine.admissible(step, self.served) and self.known(self.served_digest)):
                    self.emit(ev.ReplicaBehind())
                    return
                for group in groups:
                    for index in self.machine.wanted(step, group):
                        digest = self.served_digest
                        self.emit(ev.Sampled(step=step, group=group, index=index, version=self.served, digest=digest))
            case Validate(version) if (version, True) != (self.served, self.known(self.served_digest)):
                self.emit(ev.ReplicaBehind())
            case ComputeAdvantages(step):
                super().execute(command)
                sample = trainer_pb2.TrainSample(advantage=self.rng.random())
                self.requests.append((len(self.ledger), Request(step=step, samples=[sample])))
                for samples in state.batches[step].groups.values():
                    for one in samples.values():
                        assert one.version is None or one.version <= state.version
            case TrainStep(step):
                self.train(step)
            case Checkpoint(version):
                self.saves[self.applied] = dict(self.history)
                self.emit(ev.Checkpointed(version=version))
            case _:
                super().execute(command)

    def known(self, digest: str) -> bool:
        return self.machine.published_as(self.served, digest)

    def ensure_trainer(self) -> None:
        """Replaces a live trainer that does not match the ledger, like the controller and the trainer."""
        version, stored = self.machine.state.version, self.stored()
        history = dict(self.machine.state.history)
        if version in stored:
            history[version + 1] = follow(history, stored[version])
        ledger = trainer_pb2.LedgerPosition(version=version, latest=version + (version in stored), history=history)
        if misfit(self.applied, self.history, ledger):
            fitting = [saved for saved, lineage in self.saves.items() if not misfit(saved, lineage, ledger)]
            self.resume(max(fitting))
            self.saves = {saved: lineage for saved, lineage in self.saves.items() if saved <= self.applied}
        self.emit(ev.TrainerReady(version=self.applied))

    def train(self, step: int) -> None:
        request = self.stored()[step]
        if step > self.applied:
            self.emit(ev.TrainerLost())
            return
        if step == self.applied:
            extend(self.history, request)
            self.applied += 1
        elif follow(self.history, request) != self.history[step + 1]:
            self.emit(ev.TrainerLost())  # FAILED_PRECONDITION: it was applied from another request
            return
        if self.rng.random() >= self.mishaps:
            self.emit(ev.Trained(step=step, lineage=follow(self.machine.state.history, request)))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.sampled_from([0.05, 0.2]))
def test_whatever_redis_lost_the_job_ends_with_the_weights_that_redis_tells(
    seed: int, staleness: int, mishaps: float
) -> None:
    spec = make_spec(schedule={"steps": 5, "max_staleness": staleness})
    world = RollingWorld(spec, random.Random(seed), mishaps)
    world.run()
    state = world.machine.state
    assert state.status is Status.SUCCEEDED
    assert world.applied == state.version == 5
    assert world.history[5] == world.ours(5) == world.served_digest
    assert state.samples_trained + sum(state.samples_dropped.values()) >= 5 * 12


def test_a_sample_of_lost_weights_is_dropped_and_asked_for_again() -> None:
    machine = ready(make_spec(), validate=False)
    machine.apply(ev.Published(version=0, digest="ours"))
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0, digest="lost"))
    assert machine.state.samples_dropped == {"other_weights": 1}
    assert machine.wanted(0, 0) == [0, 1, 2]
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0, digest="ours"))
    assert machine.wanted(0, 0) == [1, 2]


def test_weights_count_as_published_by_their_digest_and_without_digests_by_their_number() -> None:
    machine = ready(make_spec(schedule={"max_staleness": 1, "steps": 9}), validate=False)
    assert machine.published_as(0, "any")
    assert not machine.published_as(1, "any")
    finish_step(machine, 0)
    machine.apply(ev.Published(version=1, digest="one"))
    assert [machine.published_as(1, digest) for digest in ("one", "another", "")] == [True, False, True]
    assert machine.published_as(0, "from before digests were kept")
    assert not machine.published_as(2, "lost")
    machine.apply(ev.Published(version=1, digest="one, replayed"))
    assert machine.published_as(1, "one")
    finish_step(machine, 1)
    assert not machine.published_as(2, "lost, and its number has come up again")


def test_the_ledger_remembers_lineages_that_a_checkpoint_may_have() -> None:
    machine = ready(make_spec(schedule={"steps": 40, "save_every": 3, "keep_last": 2}), validate=False)
    for step in range(20):
        machine.apply(ev.Published(version=step))
        finish_step(machine, step)
        machine.state.history[step + 1] = str(step + 1)
    assert sorted(machine.state.history) == [12, 15, 18, 20]


async def leading(redis: Any) -> Lease:
    lease = Lease(redis, CollectorRegistry())
    await lease._take()
    return lease


async def test_a_driver_ends_when_redis_lost_what_it_wrote(redis: Any) -> None:
    lease, spec = await leading(redis), make_spec()
    ledger = Ledger(redis, lease, "j")
    await ledger.restore(spec)
    await ledger.append([ev.Published(version=0)])
    earlier = {key: await redis.dump(key) for key in await redis.keys("ff:j:*")}
    await ledger.append([ev.PauseRequested()])
    for key, value in earlier.items():
        await redis.restore(key, 0, value, replace=True)
    before = await redis.dump(keys.job_key("j", "ledger"))
    writes: list[Any] = [partial(ledger.append, [ev.ResumeRequested()]), partial(ledger.snapshot, Machine(spec).state)]
    for write in writes:
        with pytest.raises(RolledBack):
            await write()
    assert await redis.dump(keys.job_key("j", "ledger")) == before
    machine = await ledger.restore(spec)
    assert machine.state.published == 0
    await ledger.append([ev.CancelRequested()])
    assert (await Ledger(redis, lease, "j").restore(spec)).state.status is Status.CANCELLED


async def test_a_write_whose_answer_was_lost_is_made_once(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await leading(redis)
    ledger = Ledger(redis, lease, "j")
    transaction = lease.transaction

    async def twice(fill: Any, *watched: str) -> Any:
        await transaction(fill, *watched)
        return await transaction(fill, *watched)

    monkeypatch.setattr(lease, "transaction", twice)
    await ledger.append([ev.Published(version=0)])
    await ledger.append([ev.PauseRequested()])
    assert await redis.llen(keys.job_key("j", "ledger")) == 2
