"""The state machine against a simulated world: whatever the order of events, crashes included, the invariants hold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.settings import AdvantageSettings
from flowfleet.job.spec import JobSpec, parse_job
from services.controller.job.machine import events as ev
from services.controller.job.machine.batch import Phase, Scored
from services.controller.job.machine.command import (
    Checkpoint,
    Command,
    ComputeAdvantages,
    EnsureTrainer,
    Export,
    Generate,
    Publish,
    Score,
    TrainStep,
    Validate,
)
from services.controller.job.machine.events import VOLATILE, event_from_json, event_to_json
from services.controller.job.machine.state import State, Status
from services.controller.job.machine.state_machine import MAX_LOST, Machine


def make_spec(**changes: object) -> JobSpec:
    schedule = {"steps": 3, "save_every": 2, "validate_every": 2, "max_staleness": 0} | dict(
        changes.pop("schedule", {})
    )  # type: ignore[call-overload]
    rollout = {"prompts_per_step": 4, "group_size": 3, "batch_size": 6} | dict(changes.pop("rollout", {}))  # type: ignore[call-overload]
    job = {
        "model": {"path": "model"},
        "rewards": {"ocr": {}},
        "data": {"train": "t.txt", "validation": "v.txt"},
        "schedule": schedule,
        "rollout": rollout,
    }
    return parse_job(job | changes)


class World:
    """Trainer, replicas and rewards as the machine sees them, with seeded mishaps; keeps what an auditor would."""

    def __init__(self, spec: JobSpec, rng: random.Random, mishaps: float) -> None:
        self.spec, self.rng, self.mishaps = spec, rng, mishaps
        self.machine = Machine(spec)
        self.ledger: list[bytes] = []
        self.applied = 0  # in the trainer's weights
        self.saved = 0  # in its newest checkpoint
        self.first_applied: list[int] = []
        self.served = -1
        self.serves_evaluated = False
        self.publishes: list[tuple[int, bool]] = []
        self.trained_on: dict[int, list[int]] = {}
        self.in_pairs: dict[int, int] = {}
        self.validated: set[int] = set()
        self.clock = 0.0

    def emit(self, event: ev.Event) -> None:
        self.clock += 1.0
        event = event.model_copy(update={"at": self.clock})
        if not isinstance(event, VOLATILE):
            self.ledger.append(event_to_json(event))
        self.machine.apply(event)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if self.machine.finished:
                return
            wanted = sorted(self.machine.commands(), key=str)
            assert wanted, f"nothing to do in {self.machine.state}"
            if self.rng.random() < self.mishaps:
                self.mishap()
            else:
                self.execute(self.rng.choice(wanted))
        raise AssertionError(f"no end in sight: {self.machine.state}")

    def folded(self) -> Machine:
        """What a controller that starts makes of the ledger."""
        machine = Machine(self.spec)
        for entry in self.ledger:
            machine.apply(event_from_json(entry))
        return machine

    def mishap(self) -> None:
        kind = self.rng.choice(["controller", "trainer", "replica", "pause"])
        if kind == "controller":
            self.machine = self.folded()
        elif kind == "trainer":
            self.applied = self.saved
            self.emit(ev.TrainerLost())
        elif kind == "replica":
            self.emit(ev.ReplicaBehind())
        else:
            self.emit(ev.PauseRequested())
            assert self.machine.commands() == set()
            self.emit(ev.ResumeRequested())

    def execute(self, command: Command) -> None:
        state = self.machine.state
        match command:
            case EnsureTrainer():
                self.emit(ev.TrainerReady(version=self.applied))
            case Publish(version, evaluated):
                if self.applied == version:
                    self.served, self.serves_evaluated = version, evaluated
                    self.publishes.append((version, evaluated))
                    self.emit(ev.Published(version=version, evaluated=evaluated))
                else:
                    self.emit(ev.TrainerLost())
            case Generate(step, groups):
                assert self.machine.admissible(step, max(self.served, 0)), (step, self.served)
                assert not self.serves_evaluated
                for group in groups:
                    for index in self.machine.wanted(step, group):
                        if self.rng.random() < 0.8:
                            self.emit(ev.Sampled(step=step, group=group, index=index, version=self.served))
                        if self.rng.random() < self.mishaps:  # delivered twice
                            self.emit(ev.Sampled(step=step, group=group, index=index, version=self.served))
            case Score(step, group):
                for index, sample in list(state.batches[step].groups[group].items()):
                    if sample.status == "sampled" and self.rng.random() < 0.9:
                        self.emit(ev.Scored(step=step, group=group, index=index, score=self.rng.random()))
                    elif sample.status == "sampled":
                        self.emit(ev.Dropped(step=step, group=group, index=index, reason="no_score_ocr"))
            case ComputeAdvantages(step):
                self.trained_on[step] = [
                    sample.version
                    for group in state.batches[step].groups.values()
                    for sample in group.values()
                    if sample.status == "scored" and sample.version is not None
                ]
                self.emit(ev.AdvantagesReady(step=step, num_samples=self.chosen(step)))
            case TrainStep(step):
                if step > self.applied:
                    self.emit(ev.TrainerLost())  # FAILED_PRECONDITION: it was restarted, unnoticed so far
                    return
                if self.rng.random() < self.mishaps and self.lose_some(step):
                    return
                if step == self.applied:
                    self.applied += 1
                    if step not in self.first_applied:
                        self.first_applied.append(step)
                if self.rng.random() < self.mishaps:
                    return  # the controller died before it heard
                self.emit(ev.Trained(step=step))
            case Checkpoint(version):
                self.saved = max(self.saved, self.applied)
                self.emit(ev.Checkpointed(version=version))
            case Validate(version):
                assert version == self.served
                assert self.serves_evaluated == self.spec.averages
                self.validated.add(version)
                self.emit(ev.Validated(version=version, reward=0.5))
            case Export():
                self.emit(ev.Exported())

    def lose_some(self, step: int) -> bool:
        """Blobs of a step's samples before it is applied; of one that is replayed too."""
        if step < self.machine.state.version:
            self.emit(ev.Lost(step=step, group=0, index=0))
            return False
        groups = self.machine.state.batches[step].groups.items()
        scored = [(g, i) for g, group in groups for i, sample in group.items() if sample.status == "scored"]
        for group, index in self.rng.sample(scored, min(2, len(scored))):
            self.emit(ev.Lost(step=step, group=group, index=index))
        assert not scored or TrainStep(step) not in self.machine.commands()
        return bool(scored)

    def chosen(self, step: int) -> int | None:
        """Samples in the request: at most `best_of` of a group, or any even number, 0 too, where the loss wants
        pairs."""
        best_of = self.spec.algorithm.of(AdvantageSettings).best_of
        if best_of is not None:
            groups = self.machine.state.batches[step].groups.values()
            sizes = [sum(sample.status == "scored" for sample in group.values()) for group in groups]
            self.in_pairs[step] = sum(min(size, best_of) for size in sizes)
            return self.in_pairs[step]
        if not self.spec.loss.needs_pairs:
            return None
        self.in_pairs[step] = 2 * self.rng.randint(0, len(self.trained_on[step]) // 2)
        return self.in_pairs[step]


@pytest.mark.parametrize("mishaps", [0.0, 0.4])
def test_a_job_of_no_steps_validates_and_ends(mishaps: float) -> None:
    for seed in range(20):
        world = World(make_spec(schedule={"steps": 0}), random.Random(seed), mishaps)
        world.run()
        assert world.machine.state.status is Status.SUCCEEDED
        assert (world.validated, world.trained_on, world.saved) == ({0}, {}, 0)
        assert not world.machine.state.exported
        assert world.machine.state.held_out_reward == 0.5


def test_one_step_in_order() -> None:
    """The textbook case: which command follows which event."""
    machine = Machine(make_spec(schedule={"steps": 1, "validate_every": 1}))
    assert machine.commands() == {EnsureTrainer()}
    machine.apply(ev.TrainerReady(version=0))
    assert machine.commands() == {Publish(0)}
    machine.apply(ev.Published(version=0))
    assert machine.state.status is Status.RUNNING
    assert machine.commands() == {Validate(0), Generate(0, (0, 1)), Generate(0, (2, 3))}
    machine.apply(ev.Validated(version=0, reward=0.5))
    for group in range(4):
        for index in range(3):
            machine.apply(ev.Sampled(step=0, group=group, index=index, version=0))
    assert machine.phase is Phase.SCORE
    assert machine.commands() == {Score(0, group) for group in range(4)}
    for group in range(4):
        for index in range(3):
            machine.apply(ev.Scored(step=0, group=group, index=index, score=1.0))
    assert machine.commands() == {ComputeAdvantages(0)}
    machine.apply(ev.AdvantagesReady(step=0))
    assert machine.commands() == {TrainStep(0)}
    machine.apply(ev.Trained(step=0))
    assert machine.state.samples_trained == 12
    assert machine.commands() == {Publish(1)}
    machine.apply(ev.Published(version=1))
    assert machine.commands() == {Checkpoint(1), Validate(1)}
    machine.apply(ev.Checkpointed(version=1))
    machine.apply(ev.Validated(version=1, reward=0.9))
    assert machine.commands() == {Export()}
    machine.apply(ev.Exported())
    assert machine.state.status is Status.SUCCEEDED
    assert machine.commands() == set()


def averaged(**schedule: object) -> JobSpec:
    return make_spec(trainer={"ema": {"decay": 0.9}}, schedule=schedule)


@pytest.mark.parametrize(
    "spec_of", [lambda **schedule: make_spec(schedule=schedule), averaged], ids=["plain", "averaged"]
)
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([0.0, 0.02, 0.15]))
def test_every_job_ends_well_and_keeps_the_invariants(
    spec_of: Callable[..., JobSpec], seed: int, staleness: int, mishaps: float
) -> None:
    """`World` asserts at each command that the kind of weights is the right one: none samples with an average."""
    world = World(spec_of(steps=5, max_staleness=staleness), random.Random(seed), mishaps)
    world.run()
    state = world.machine.state
    assert state.status is Status.SUCCEEDED
    assert world.first_applied == list(range(5))  # every step once, in order
    assert world.applied == state.version == state.published == state.checkpointed == 5
    assert world.validated == {0, 2, 4, 5}
    for step, versions in world.trained_on.items():
        assert versions
        assert all(step - staleness <= version <= step for version in versions)  # promise 3 of docs/architecture.md
    if not mishaps:
        kinds = [(version, False) for version in range(6)]
        if world.spec.averages:
            kinds = sorted(
                [*kinds[:5], *((version, True) for version in world.validated)], key=lambda kind: (kind[0], not kind[1])
            )
        assert world.publishes == kinds
    assert world.folded().state.without_volatile() == state.without_volatile()


def test_an_average_is_published_for_its_validation_alone() -> None:
    machine = Machine(averaged(steps=4, validate_every=2, max_staleness=1))
    machine.apply(ev.TrainerReady(version=0))
    assert machine.commands() == {Publish(0, evaluated=True)}
    machine.apply(ev.Published(version=0, evaluated=True))
    assert (machine.commands(), machine.phase) == ({Validate(0)}, Phase.VALIDATE)
    machine.apply(ev.ReplicaBehind())
    assert machine.commands() == {Validate(0), Publish(0, evaluated=True)}
    machine.apply(ev.Published(version=0, evaluated=True))
    machine.apply(ev.Validated(version=0, reward=0.5))
    assert (machine.commands(), machine.phase) == ({Publish(0)}, Phase.PUBLISH)
    machine.apply(ev.Published(version=0))
    assert {type(command) for command in machine.commands()} == {Generate}
    finish_step(machine, 0)
    assert Publish(1) in machine.commands()


def test_an_average_without_held_out_prompts_is_not_published() -> None:
    spec = averaged()
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"validation": None})})
    world = World(spec, random.Random(1), 0.0)
    world.run()
    assert world.publishes == [(version, False) for version in range(4)]


def test_a_ledger_from_before_there_were_averages_is_read() -> None:
    """A DiffusionNFT job has one by default: its version is published again, and nothing is lost."""
    machine = Machine(averaged(steps=3))
    machine.apply(ev.TrainerReady(version=0))
    machine.apply(event_from_json(b'{"kind": "published", "version": 0}'))
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
    assert machine.state.batches[0].count("sampled") == 1
    assert Publish(0, evaluated=True) in machine.commands()
    assert Validate(0) not in machine.commands()


def test_every_sample_is_accounted_for() -> None:
    """Asked = trained + dropped, with refills counted as asked."""
    world = World(make_spec(rollout={"max_refills": 2}), random.Random(3), 0.05)
    world.run()
    state = world.machine.state
    refilled = state.samples_trained + sum(state.samples_dropped.values()) - 3 * 12
    assert sum(state.samples_dropped.values()) > 0
    assert 0 <= refilled <= 3 * 4 * 2


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([("not_in_a_pair", {"name": "online_dpo"}), ("not_best_or_worst", {"best_of": 2})]),
)
def test_what_is_left_out_is_dropped_when_its_step_trains(
    seed: int, mishaps: float, left_out: tuple[str, dict[str, object]]
) -> None:
    """Whatever happens, each scored sample is trained on or counted as left out, once."""
    reason, algorithm = left_out
    world = World(make_spec(algorithm=algorithm), random.Random(seed), mishaps)
    world.run()
    state = world.machine.state
    num_scored = sum(map(len, world.trained_on.values()))
    assert state.status is Status.SUCCEEDED
    assert state.samples_trained == sum(world.in_pairs.values())
    assert state.samples_dropped.get(reason, 0) == num_scored - state.samples_trained
    assert not {"not_in_a_pair", "not_best_or_worst"} - {reason} & state.samples_dropped.keys()


def test_a_step_without_a_pair_trains_on_nothing_and_goes_on() -> None:
    machine = ready(make_spec(algorithm={"name": "online_dpo"}))
    score_step(machine, 0)
    machine.apply(ev.AdvantagesReady(step=0, num_samples=0))
    assert machine.commands() == {TrainStep(0)}
    assert machine.state.samples_dropped == {}
    machine.apply(ev.Trained(step=0))
    assert (machine.state.version, machine.state.samples_trained) == (1, 0)
    assert machine.state.samples_dropped == {"not_in_a_pair": 12}
    assert machine.commands() == {Publish(1)}


def test_the_kl_of_a_sample_is_kept_and_old_ledgers_have_none() -> None:
    machine = ready(make_spec())
    for index, fields in enumerate(({"reference_kl": 0.25}, {})):
        machine.apply(ev.Sampled(step=0, group=0, index=index, version=0))
        stored = ev.Scored(step=0, group=0, index=index, score=0.5).model_dump(exclude={"reference_kl"}) | fields
        machine.apply(event_from_json(json.dumps(stored).encode()))
    again = State.model_validate_json(machine.state.model_dump_json())
    assert [sample.reference_kl for sample in again.batches[0].scored()] == [0.25, 0.0]


def test_scores_are_kept_by_reward() -> None:
    machine = ready(make_spec())
    machine.apply(ev.Sampled(step=0, group=1, index=2, version=0))
    fact = ev.Scored(step=0, group=1, index=2, score=0.75, scores={"ocr": 0.5, "jpeg": 1.0})
    machine.apply(event_from_json(event_to_json(fact)))
    assert machine.state.batches[0].scored() == [Scored(1, 2, 0.75, {"ocr": 0.5, "jpeg": 1.0})]
    assert Machine(machine.spec, State.model_validate_json(machine.state.model_dump_json())).state == machine.state


def test_ledgers_from_before_scores_and_pairs_fold() -> None:
    machine = ready(make_spec())
    for group, samples in machine.state.batches[0].groups.items():
        for index in samples:
            place = f'"step": 0, "group": {group}, "index": {index}'
            machine.apply(event_from_json(f'{{"kind": "sampled", {place}, "version": 0}}'.encode()))
            machine.apply(event_from_json(f'{{"kind": "scored", {place}, "score": 0.5}}'.encode()))
    machine.apply(event_from_json(b'{"kind": "advantages_ready", "step": 0}'))
    assert machine.state.batches[0].scored()[0] == Scored(0, 0, 0.5)
    machine.apply(event_from_json(b'{"kind": "trained", "step": 0}'))
    assert (machine.state.samples_trained, machine.state.samples_dropped) == (12, {})


def test_of_a_given_pair_there_is_no_other_sample() -> None:
    spec = make_spec(algorithm={"name": "dpo"}, rollout={"group_size": 2, "max_refills": 9})
    machine = ready(spec)
    machine.apply(ev.Dropped(step=0, group=0, index=1, reason="rollout_failed"))
    assert machine.wanted(0, 0) == [0]
    assert machine.state.samples_dropped == {"rollout_failed": 1}


def test_counting_instead_of_refilling() -> None:
    machine = ready(make_spec(rollout={"max_refills": 0}))
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
    machine.apply(ev.Dropped(step=0, group=0, index=0, reason="no_score_ocr"))
    assert machine.wanted(0, 0) == [1, 2]
    assert machine.state.samples_dropped == {"no_score_ocr": 1}


def test_refilling_asks_for_a_new_sample_and_stops_at_the_limit() -> None:
    machine = ready(make_spec(rollout={"max_refills": 1}))
    machine.apply(ev.Dropped(step=0, group=0, index=0, reason="rollout_failed"))
    assert machine.wanted(0, 0) == [1, 2, 3]
    machine.apply(ev.Dropped(step=0, group=0, index=3, reason="rollout_failed"))
    assert machine.wanted(0, 0) == [1, 2]


def test_a_stale_sample_is_refused_and_counted() -> None:
    machine = ready(make_spec(schedule={"steps": 3}))
    finish_step(machine, 0)
    machine.apply(ev.Published(version=1))
    machine.apply(ev.Sampled(step=1, group=0, index=0, version=0))
    assert machine.wanted(1, 0) == [0, 1, 2]
    assert machine.state.samples_dropped == {"stale": 1}


def test_duplicates_change_nothing_but_their_counter() -> None:
    machine = ready(make_spec())
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
    before = machine.state.model_copy(deep=True)
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
    machine.apply(ev.Sampled(step=7, group=0, index=0, version=0))
    assert machine.state.duplicates == 2
    machine.state.duplicates = 0
    assert machine.state == before


def test_a_restarted_trainer_replays_then_publishes_again() -> None:
    machine = ready(make_spec(schedule={"save_every": 10}))
    finish_step(machine, 0)
    machine.apply(ev.Published(version=1))
    machine.apply(ev.TrainerLost())
    assert EnsureTrainer() in machine.commands()
    machine.apply(ev.TrainerReady(version=0))
    assert TrainStep(0) in machine.commands()
    assert not any(isinstance(command, Publish) for command in machine.commands())
    machine.apply(ev.Trained(step=0))
    assert machine.state.version == 1
    assert Publish(1) in machine.commands()


def test_a_trainer_ahead_of_the_controller_is_asked_for_its_record() -> None:
    """The controller died between the update and its record."""
    machine = ready(make_spec())
    score_step(machine, 0)
    machine.apply(ev.AdvantagesReady(step=0))
    machine.apply(ev.TrainerReady(version=1))
    assert TrainStep(0) in machine.commands()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_sampling_runs_ahead_by_max_staleness(staleness: int) -> None:
    machine = ready(make_spec(schedule={"steps": 9, "max_staleness": staleness}))
    steps = {command.step for command in machine.commands() if isinstance(command, Generate)}
    assert steps == set(range(staleness + 1))


def test_an_update_waits_for_the_validation_of_the_version_before() -> None:
    machine = ready(make_spec(schedule={"steps": 4, "validate_every": 1}), validate=False)
    score_step(machine, 0)
    machine.apply(ev.AdvantagesReady(step=0))
    assert machine.phase is Phase.VALIDATE
    assert machine.commands() == {Validate(0)}
    machine.apply(ev.ReplicaBehind())  # the replica that validates was killed
    assert machine.commands() == {Validate(0), Publish(0)}
    machine.apply(ev.Published(version=0))
    machine.apply(ev.Validated(version=0, reward=None))
    assert machine.commands() == {TrainStep(0)}


def test_cancel_and_failure_end_everything() -> None:
    for event, status in ((ev.CancelRequested(), Status.CANCELLED), (ev.Failed(reason="why"), Status.FAILED)):
        machine = ready(make_spec())
        machine.apply(event)
        assert machine.state.status is status
        assert machine.commands() == set()
        machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
        assert machine.state.batches[0].count("sampled") == 0


def ready(spec: JobSpec, *, validate: bool = True) -> Machine:
    """A machine whose step 0 may be sampled."""
    machine = Machine(spec)
    machine.apply(ev.TrainerReady(version=0))
    machine.apply(ev.Published(version=0))
    if validate:
        machine.apply(ev.Validated(version=0, reward=0.5))
    return machine


def score_step(machine: Machine, step: int) -> None:
    for group, samples in machine.state.batches[step].groups.items():
        for index in samples:
            machine.apply(ev.Sampled(step=step, group=group, index=index, version=step))
            machine.apply(ev.Scored(step=step, group=group, index=index, score=0.5))


def finish_step(machine: Machine, step: int) -> None:
    score_step(machine, step)
    machine.apply(ev.AdvantagesReady(step=step))
    machine.apply(ev.Trained(step=step))


def ready_to_train(limit: float | None, **algorithm: object) -> Machine:
    """A job of which step 0 has its advantages; its step trains with a gap next."""
    spec = make_spec(rollout={"max_log_prob_gap": limit, "quantization": "fp8"}, algorithm=algorithm)
    world = World(spec, random.Random(0), 0.0)
    while TrainStep(0) not in world.machine.commands():
        world.execute(min(world.machine.commands(), key=str))
    return world.machine


@pytest.mark.parametrize(
    ("limit", "gap", "pauses"),
    [
        (1e-4, 2e-4, True),
        (1e-4, 1e-4, False),
        (1e-4, float("nan"), True),
        (1e-4, None, False),  # the loss reads no log-probs
        (None, 1.0, False),
    ],
)
def test_a_gap_above_the_limit_pauses_the_job_after_its_step(
    limit: float | None, gap: float | None, pauses: bool
) -> None:
    machine = ready_to_train(limit)
    event = ev.Trained(step=0, log_prob_gap=gap)
    assert machine.too_far(event) is pauses
    machine.apply(event)
    assert machine.state.version == 1
    assert (machine.state.status is Status.PAUSED) is pauses
    assert (machine.commands() == set()) is pauses
    assert bool(machine.state.reason) is pauses


@pytest.mark.parametrize("gap", [2e-5, None], ids=["some rows", "all rows"])
def test_a_gap_that_is_not_finite_pauses_a_job_with_a_limit(gap: float | None) -> None:
    event = ev.Trained(step=0, log_prob_gap=gap, log_prob_not_finite=0.125)
    assert not ready_to_train(None).too_far(event)
    machine = ready_to_train(1e-4)
    assert machine.too_far(event)
    machine.apply(event_from_json(event_to_json(event)))
    assert machine.state.status is Status.PAUSED
    assert "NaN or infinite in 12.50% of the rows" in machine.state.reason


@pytest.mark.parametrize(
    ("event", "what"),
    [({"taught_nothing": True}, "gradient of any update"), ({"log_prob_not_finite": 1.0}, "log-prob of any row")],
)
def test_a_step_that_taught_nothing_pauses_every_job_even_at_its_end(event: dict[str, Any], what: str) -> None:
    spec = make_spec()
    world, last = World(spec, random.Random(0), 0.0), spec.schedule.steps - 1
    while TrainStep(last) not in world.machine.commands():
        world.execute(min(world.machine.commands(), key=str))
    trained = ev.Trained(step=last, **event)
    assert world.machine.too_far(trained)
    world.applied = last + 1
    world.machine.apply(event_from_json(event_to_json(trained)))
    assert world.machine.state.status is Status.PAUSED
    assert world.machine.state.reason.startswith(f"step {last}: no {what} is finite, so the job learns nothing")
    world.machine.apply(ev.ResumeRequested())
    while not world.machine.finished:
        world.execute(min(world.machine.commands(), key=str))
    assert world.machine.state.status is Status.SUCCEEDED


def test_a_job_that_paused_itself_goes_on_until_a_later_step_is_above_the_limit() -> None:
    machine = ready_to_train(1e-4)
    machine.apply(ev.Trained(step=0, log_prob_gap=2.5e-4))
    assert machine.state.reason.startswith(
        "step 0: the mean |log-prob of the trainer - log-prob of the rollout| is 2.50e-04, above "
        "rollout.max_log_prob_gap = 1.00e-04; resume the job"
    )
    assert 'rollout.quantization = "none"' in machine.state.reason
    again = Machine(machine.spec, State.model_validate_json(machine.state.model_dump_json()))  # a new controller
    assert again.commands() == set()
    again.apply(ev.TrainerReady(version=1))
    again.apply(ev.ResumeRequested())
    assert (again.state.status, again.state.reason) == (Status.RUNNING, "")
    assert again.commands() == {Publish(1)}
    replayed = ev.Trained(step=0, log_prob_gap=2.5e-4)  # by a trainer that came back from a checkpoint
    assert not again.too_far(replayed)
    again.apply(replayed)
    assert again.state.status is Status.RUNNING
    later = ev.Trained(step=1, log_prob_gap=3e-4)
    assert again.too_far(later)


def test_a_gap_of_the_last_step_pauses_no_job() -> None:
    spec = make_spec(rollout={"max_log_prob_gap": 1e-4})
    world, last = World(spec, random.Random(0), 0.0), spec.schedule.steps - 1
    while TrainStep(last) not in world.machine.commands():
        world.execute(min(world.machine.commands(), key=str))
    event = ev.Trained(step=last, log_prob_gap=1.0)
    assert not world.machine.too_far(event)
    world.applied = last + 1
    world.machine.apply(event)
    assert (world.machine.state.status, world.machine.state.reason) == (Status.RUNNING, "")
    assert Publish(last + 1) in world.machine.commands()
    while not world.machine.finished:
        world.execute(min(world.machine.commands(), key=str))
    assert world.machine.state.status is Status.SUCCEEDED
    assert world.machine.state.exported


def test_what_helps_against_a_gap_depends_on_the_job() -> None:
    machine = ready_to_train(1e-4, old_log_probs="rollout")
    machine.apply(ev.Trained(step=0, log_prob_gap=1.0))
    assert 'algorithm.old_log_probs = "recompute"' in machine.state.reason


def test_a_ledger_from_before_gaps_were_kept_is_read() -> None:
    event = event_from_json(b'{"kind": "trained", "step": 0}')
    assert event == ev.Trained(step=0)
    machine = ready_to_train(1e-4)
    machine.apply(event)
    assert machine.state.status is Status.RUNNING


def test_a_lost_sample_is_made_again_with_the_score_that_it_has() -> None:
    """At the same version; at another it is another sample, which has to be scored."""
    machine = ready(make_spec(schedule={"steps": 3, "max_staleness": 1}))
    for group in range(4):
        for index in range(3):
            machine.apply(ev.Sampled(step=0, group=group, index=index, version=0))
            machine.apply(ev.Scored(step=0, group=group, index=index, score=float(index), scores={"ocr": 1.0}))
    machine.apply(ev.AdvantagesReady(step=0))
    before = machine.state.batches[0].scored()
    assert TrainStep(0) in machine.commands()
    for _ in range(2):  # recorded twice is once
        machine.apply(ev.Lost(step=0, group=2, index=1))
    assert machine.wanted(0, 2) == [1]
    assert TrainStep(0) not in machine.commands()
    assert any(isinstance(c, Generate) and c.step == 0 for c in machine.commands())
    machine.apply(ev.Sampled(step=0, group=2, index=1, version=0))
    assert machine.state.batches[0].scored() == before
    assert ComputeAdvantages(0) in machine.commands()
    assert not any(isinstance(command, Score) and command.step == 0 for command in machine.commands())

    step = machine.state.batches[1]
    machine.apply(ev.Sampled(step=1, group=0, index=0, version=0))
    machine.apply(ev.Scored(step=1, group=0, index=0, score=1.0))
    machine.apply(ev.Trained(step=0))
    machine.apply(ev.Lost(step=1, group=0, index=0))
    machine.apply(ev.Sampled(step=1, group=0, index=0, version=1))
    assert (step.groups[0][0].status, step.groups[0][0].version) == ("sampled", 1)
    assert machine.state.samples_dropped == {}
    assert machine.state.duplicates == 0


def test_a_sample_that_is_lost_time_after_time_is_dropped_with_its_reason() -> None:
    machine = ready(make_spec())
    for _ in range(MAX_LOST):
        machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
        machine.apply(ev.Lost(step=0, group=0, index=0))
        assert machine.wanted(0, 0) == [0, 1, 2]
    machine.apply(ev.Sampled(step=0, group=0, index=0, version=0))
    machine.apply(ev.Lost(step=0, group=0, index=0))
    assert machine.state.samples_dropped == {"lost": 1}
    assert machine.state.batches[0].groups[0][0].status == "dropped"


def test_a_replay_goes_without_what_it_lost() -> None:
    machine = ready(make_spec())
    machine.state.version = 1
    machine.apply(ev.Lost(step=0, group=0, index=0))
    assert machine.state.samples_dropped == {"lost": 1}


# Another number of steps ----------------------------------------------------------------------------------------------


def run_a_while(world: World, commands: int) -> None:
    for _ in range(commands):
        if not world.machine.finished:
            world.execute(world.rng.choice(sorted(world.machine.commands(), key=str)))


@pytest.mark.parametrize("mishaps", [0.0, 0.1])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_finished_job_ends_after_the_steps_that_are_done(seed: int, staleness: int, mishaps: float) -> None:
    """Whenever that is; all that a planned end has it has too, and what was sampled beyond is accounted for."""
    rng = random.Random(seed)
    world = World(make_spec(schedule={"steps": 9, "save_every": 4, "max_staleness": staleness}), rng, mishaps)
    run_a_while(world, 15 + 40 * seed)
    state = world.machine.state
    done = state.version
    held = {step: batch.count("sampled") + batch.count("scored") for step, batch in state.batches.items()}
    at_trainer = int(done in state.batches and state.batches[done].ready)
    world.emit(ev.StepsChanged(steps=0))
    assert world.machine.steps == done + at_trainer
    dropped = sum(number for step, number in held.items() if step >= world.machine.steps)
    assert world.machine.state.samples_dropped.get("finished", 0) == dropped
    world.run()
    state = world.machine.state
    assert (state.status, state.version, state.checkpointed) == (Status.SUCCEEDED, done + at_trainer, done + at_trainer)
    assert state.exported
    assert done + at_trainer in world.validated
    assert world.first_applied == list(range(done + at_trainer))


@pytest.mark.parametrize("seed", range(4))
def test_an_extended_job_goes_on_and_exports_once_more(seed: int) -> None:
    """Also where it was extended while its last steps were being exported."""
    rng = random.Random(seed)
    world = World(make_spec(schedule={"steps": 2, "save_every": 1}, trainer={"ema": {"decay": 0.9}}), rng, 0.05)
    while not (Export() in world.machine.commands() or world.machine.finished):
        run_a_while(world, 1)
    world.emit(ev.StepsChanged(steps=4))
    world.emit(ev.Exported())  # of the export that was under way
    assert not world.machine.state.exported
    world.run()
    state = world.machine.state
    assert (state.status, state.version, state.exported) == (Status.SUCCEEDED, 4, True)
    assert world.first_applied == [0, 1, 2, 3]


def test_a_change_of_steps_is_folded_again_as_it_was() -> None:
    world = World(make_spec(schedule={"steps": 5, "max_staleness": 1}), random.Random(7), 0.0)
    run_a_while(world, 30)
    for steps in (0, 7, 3):
        world.emit(ev.StepsChanged(steps=steps))
        run_a_while(world, 5)
    assert world.folded().state.without_volatile() == world.machine.state.without_volatile()
