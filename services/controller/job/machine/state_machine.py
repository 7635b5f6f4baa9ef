"""The state machine of a job, pure: events in, commands out, no I/O, no clock of its own.

    state  = machine.apply(event)      facts, folded one by one (events.py)
    wanted = machine.commands()        everything that should be running now, derived from the state alone

Commands are level-triggered: the driver (driver.py) starts what is wanted and not yet running, so a controller
that was killed only folds its ledger and continues; there is no second recovery path. That works because every command
is idempotent: a sample has an identity, TrainStep is keyed by step, a replica skips a version that it holds.

    STARTING ──first version published──► RUNNING ──last version exported, saved, validated──► SUCCEEDED
        ▲ │                                 ▲ │
      resume pause                      resume pause              anything unfinished: cancel ──► CANCELLED
        │ ▼                                 │ ▼                                        failed ──► FAILED
        └─────────────── PAUSED ────────────┘

    Phase of the next step to train:

    ROLLOUT ──► SCORE ──► ADVANTAGE ──► TRAIN ──► PUBLISH ──► CHECKPOINT ──► VALIDATE ──► ROLLOUT …
       ▲  a lost or refilled sample │      ▲           │          where they are due     └─► EXPORT, after the last
       └────────────────────────────┘      └───────────┘ a resumed trainer replays

Versions and steps: version v is the policy after v applied steps. Step s trains on samples of versions s −
max_staleness … s and makes version s + 1. One step goes through the phases above; with max_staleness > 0 later steps
are sampled meanwhile (batch.py). Where a job evaluates averaged weights, a validated version is published twice: first
its evaluated weights, for validation alone, then those that sample.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import assert_never

from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.rewards.changes import ShadowPart
from services.controller.job.credit import left_out_reason
from services.controller.job.machine import events as ev
from services.controller.job.machine import log_prob_gap as gap
from services.controller.job.machine import validation_limits
from services.controller.job.machine.batch import Batch, Phase, SampleState, with_dropped
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
from services.controller.job.machine.state import TERMINAL, Revision, State, Status

MAX_LOST = 3
"""Times that a sample is made again because a blob of it was lost; then it is dropped."""


class Machine:
    """Folds events into the state of one job and says what should run."""

    def __init__(self, spec: JobSpec, state: State | None = None) -> None:
        self.spec = spec
        self.state = state or State()

    # -- events ------------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Folds one event. Late or repeated facts change only their counters."""
        if self.finished:
            return
        self._fold(event)
        if self.state.status is Status.STARTING and self.state.published >= 0:
            self.state.status = Status.RUNNING
        self._open_batches(event.at)
        if self._complete:
            self.state.status = Status.SUCCEEDED

    def _fold(self, event: ev.Event) -> None:
        match event:
            case ev.Sampled():
                self._on_sampled(event)
            case ev.Scored():
                self._on_scored(event)
            case ev.TrainerReady():
                self._on_trainer_ready(event)
            case ev.TrainerLost():
                self.state.trainer_version = None
            case ev.Rewound():
                self._on_rewound(event)
            case ev.ReplicaBehind():
                self.state.behind = True
            case ev.Dropped():
                self._on_dropped(event)
            case ev.Lost():
                self._on_lost(event)
            case ev.AdvantagesReady():
                self._on_advantages_ready(event)
            case ev.Trained():
                self._on_trained(event)
            case ev.Published():
                self._on_published(event)
            case ev.Checkpointed():
                self.state.checkpointed = max(self.state.checkpointed, event.version)
            case ev.Validated():
                self._on_validated(event)
            case ev.Exported():
                self.state.exported = self.state.version == self.steps
            case ev.StepsChanged():
                self._on_steps_changed(event)
            case ev.RewardsChanged():
                self._on_rewards_changed(event)
            case ev.PauseRequested():
                self.state.status, self.state.reason = Status.PAUSED, event.reason or self.state.reason
                if event.step in self.state.batches:
                    self.state.batches[event.step].accepted = True
            case ev.ResumeRequested():
                self._on_resume_requested(event)
            case ev.CancelRequested():
                self.state.status, self.state.reason = Status.CANCELLED, ""
            case ev.Failed():
                self.state.status, self.state.reason = Status.FAILED, event.reason
            case _:
                assert_never(event)

    def _on_trainer_ready(self, event: ev.TrainerReady) -> None:
        self.state.trainer_version = event.version
        if event.version < self.state.version:
            self.state.published = -1  # its replay may differ in rounding: replicas compare digests again
            self.state.checkpointed = min(self.state.checkpointed, event.version)  # newer ones are lost

    def _on_rewound(self, event: ev.Rewound) -> None:
        """Returns to `version`; samples of later steps, trained on or still held, count as dropped."""
        state = self.state
        held = sum(batch.count("sampled") + batch.count("scored") for batch in state.batches.values())
        self._count_drop(DropReason.CHECKPOINT_LOST, max(0, state.samples_trained - event.samples) + held)
        state.version, state.samples_trained, state.batches = event.version, event.samples, {}
        state.checkpointed, state.validated = (
            min(state.checkpointed, event.version),
            min(state.validated, event.version),
        )
        state.published, state.evaluated, state.exported = -1, False, False
        state.history = {version: known for version, known in state.history.items() if version <= event.version}
        state.weights = {version: known for version, known in state.weights.items() if version <= event.version}

    def _on_sampled(self, event: ev.Sampled) -> None:
        sample = self._sample(event.step, event.group, event.index)
        if sample is None or sample.status != "wanted":
            self.state.duplicates += 1
        elif not self.admissible(event.step, event.version):
            self._count_drop(DropReason.STALE)
        elif not self.published_as(event.version, event.digest):
            self._count_drop(DropReason.OTHER_WEIGHTS)
        else:
            is_same = sample.score is not None and sample.version == event.version  # lost, and made again
            sample.version, batch = event.version, self.state.batches[event.step]
            batch.move(event.group, sample, "scored" if is_same else "sampled")
            if not batch.has("wanted"):
                batch.sampled_at = event.at
            self._note_scored(event.step, event.at)

    def _on_scored(self, event: ev.Scored) -> None:
        sample = self._sample(event.step, event.group, event.index)
        if sample is not None and sample.status == "sampled":
            sample.score, sample.scores, sample.reference_kl = event.score, event.scores, event.reference_kl
            self.state.batches[event.step].move(event.group, sample, "scored")
            self._note_scored(event.step, event.at)

    def _on_dropped(self, event: ev.Dropped) -> None:
        sample = self._sample(event.step, event.group, event.index)
        if sample is None or sample.status not in ("wanted", "sampled"):
            return
        self.state.batches[event.step].move(event.group, sample, "dropped")
        sample.reason = event.reason
        if event.cause:
            self.state.drop_causes.setdefault(event.reason, event.cause)
        self._count_drop(event.reason)
        if event.refill:
            self._refill(self.state.batches[event.step], event.group)
        self._note_scored(event.step, event.at)

    def _on_lost(self, event: ev.Lost) -> None:
        sample = self._sample(event.step, event.group, event.index)
        if event.step < self.state.version:
            self._count_drop(DropReason.LOST)
        elif sample is not None and sample.status in ("sampled", "scored"):
            batch = self.state.batches[event.step]
            batch.ready = False
            batch.move(event.group, sample, "wanted")
            sample.times_lost += 1
            if sample.times_lost > MAX_LOST:
                self._on_dropped(ev.Dropped(**event.model_dump(exclude={"kind"}), reason=DropReason.LOST))

    def _on_advantages_ready(self, event: ev.AdvantagesReady) -> None:
        batch = self.state.batches.get(event.step)
        if batch is not None:
            batch.ready, batch.ready_at, batch.num_chosen = True, event.at, event.num_samples
            batch.figures, batch.spread = event.figures, event.spread

    def _on_trained(self, event: ev.Trained) -> None:
        if self.state.trainer_version is not None:
            self.state.trainer_version = max(self.state.trainer_version, event.step + 1)
        too_far = self.too_far(event)
        if event.step == self.state.version:
            batch = self.state.batches.pop(event.step)
            self.state.samples_trained += batch.num_trained
            self._count_drop(left_out_reason(self.spec), batch.num_left_out)
            self.state.version += 1
            self.state.trained_at = event.at
            self._remember(event.lineage)
            if too_far:
                self.state.status, self.state.reason = Status.PAUSED, gap.reason(self.spec, event)

    def _on_published(self, event: ev.Published) -> None:
        if event.version == self.state.version:
            self.state.published, self.state.evaluated, self.state.behind = event.version, event.evaluated, False
            if event.digest:
                self.state.weights.setdefault(event.version, set()).add(event.digest)

    def _on_validated(self, event: ev.Validated) -> None:
        if reason := self.pause_reason(event):
            self.state.status, self.state.reason = Status.PAUSED, reason
        self.state.validated = max(self.state.validated, event.version)
        self.state.held_out_reward = event.reward

    def _on_steps_changed(self, event: ev.StepsChanged) -> None:
        """Drops samples of steps beyond the new end. A step whose request is stored is still trained."""
        state, front = self.state, self.state.batches.get(self.state.version)
        least = state.version + (1 if front is not None and front.ready else 0)
        state.steps, state.steps_asked = max(least, event.steps), event.steps
        state.exported = state.exported and state.version == state.steps
        for step in [step for step in state.batches if step >= state.steps]:
            batch = state.batches.pop(step)
            self._count_drop(DropReason.FINISHED, batch.count("sampled") + batch.count("scored"))

    def _on_rewards_changed(self, event: ev.RewardsChanged) -> None:
        """Samples keep the revision they were scored with. Unused revisions are deleted."""
        if event.number > self.rewards_number:
            first = self.first_changed(unscored=event.unscored, open_steps=event.open_steps)
            before = [r for r in self.state.revisions if r.from_step < first]
            self.state.revisions = [*before, Revision(number=event.number, from_step=first, set=event.set)]
            past = [r for r in self.state.revisions if r.from_step <= self.state.version]
            self.state.revisions = [r for r in self.state.revisions if r not in past[:-1]]
            for batch in [batch for step, batch in self.state.batches.items() if step >= first]:
                self.state.samples_dropped = dict(Counter(self.state.samples_dropped) - batch.score_again())

    def _on_resume_requested(self, event: ev.ResumeRequested) -> None:
        self.state.status = Status.RUNNING if self.state.published >= 0 else Status.STARTING
        self.state.reason = ""

    # -- commands ----------------------------------------------------------------------------------------------

    def commands(self, most: int | None = None) -> set[Command]:
        """Everything that should be running now, with at most `most` Generate and `most` Score per step. Empty while
        paused and at the end."""
        if self.finished or self.state.status is Status.PAUSED:
            return set()
        wanted: set[Command] = set()
        if self.state.trainer_version is None:
            wanted.add(EnsureTrainer())
        else:
            wanted.update(self._trainer_commands(self.state.trainer_version))
        for batch in self.state.batches.values():
            wanted.update(self._batch_commands(batch, most))
        if self._validation_due and self.state.evaluated == self.spec.averages:
            wanted.add(Validate(self.state.published))
        return wanted

    def _trainer_commands(self, version: int) -> Iterator[Command]:
        """Replay, publish, checkpoint, train. An update waits for the validation of the version before: replicas that
        restart meanwhile can still be given that version."""
        state = self.state
        if version < state.version:
            yield TrainStep(version)
            return
        if version == state.version:
            if state.behind or self._publish_due:
                yield Publish(state.version, self._evaluated_next)
            if self._publish_due:
                return
            if self._checkpoint_due:
                yield Checkpoint(state.version)
                return
            if state.version == self.steps and not self._is_exported and not self._validation_due:
                yield Export()
        front = state.batches.get(state.version)
        if front is not None and front.ready and not self._validation_due:
            yield TrainStep(front.step)

    def _batch_commands(self, batch: Batch, most: int | None) -> Iterator[Command]:
        if self.state.published >= batch.step - self.spec.schedule.max_staleness and not self.state.evaluated:
            for groups in islice(self._bundles(batch), most):
                yield Generate(batch.step, groups)
        for group in islice(batch.scoring, most):
            yield Score(batch.step, group)
        if batch.phase is Phase.ADVANTAGE:
            yield ComputeAdvantages(batch.step)

    def _bundles(self, batch: Batch) -> Iterator[tuple[int, ...]]:
        """Bundles of whole groups, up to `rollout.batch_size` rows, for one request each; some group in each lacks
        samples."""
        size, seen = self.spec.groups_per_request, set[int]()
        for start in (group - group % size for group in batch.wanting):
            if start not in seen:
                seen.add(start)
                yield tuple(range(start, min(start + size, len(batch.groups))))

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.state.status in TERMINAL

    @property
    def phase(self) -> Phase:
        """Phase that users see: what the job waits for."""
        state = self.state
        if self.finished:
            return Phase.DONE
        if state.version == 0 and state.published < 0:
            return Phase.STARTING
        if state.trainer_version is not None and state.trainer_version < state.version:
            return Phase.TRAIN
        if self._publish_due:
            return Phase.PUBLISH
        if state.version == self.steps:
            return (
                Phase.CHECKPOINT if self._checkpoint_due else Phase.VALIDATE if self._validation_due else Phase.EXPORT
            )
        phase = state.batches[state.version].phase
        waits = phase is Phase.TRAIN or state.evaluated
        return Phase.VALIDATE if waits and self._validation_due else phase

    @property
    def steps(self) -> int:
        """Training steps of the whole job."""
        return self.spec.schedule.steps if self.state.steps is None else self.state.steps

    def admissible(self, step: int, version: int) -> bool:
        """True if `step` may train on a sample of `version` (promise 3 of docs/architecture.md)."""
        return step - self.spec.schedule.max_staleness <= version <= step

    def published_as(self, version: int, digest: str) -> bool:
        """True if weights of a version with this digest are this job's, and not of a history that Redis has lost.
        Without digests, as in ledgers from before they were kept, the version's number alone counts."""
        weights = self.state.weights
        if version < min(weights, default=self.state.version + 1):
            return True
        return version in weights and (not digest or digest in weights[version])

    def too_far(self, event: ev.Trained) -> bool:
        """True if the job pauses after this update for its log-prob gap, or because it taught nothing. A step that is
        replayed after a fault does not pause it again; nor does a gap of the last, after which nothing is sampled."""
        is_new, is_last = event.step == self.state.version, event.step + 1 == self.steps
        return is_new and (gap.is_in_vain(event) or (not is_last and gap.is_above(self.spec, event)))

    def pause_reason(self, event: ev.Validated) -> str:
        """Why the job pauses after this validation, empty where it does not. The last one pauses no job, nor does one
        that is repeated."""
        pauses = self.state.validated < event.version < self.steps
        return validation_limits.reason(self.spec, event) if pauses else ""

    def rewards_at(self, step: int) -> Mapping[str, RewardPart]:
        """Rewards of a step, and of the validation of the version with the same number."""
        revision = self._revision(step)
        return revision.set.rewards if revision else self.spec.rewards

    def training_rewards_at(self, step: int) -> Mapping[str, RewardPart]:
        """Rewards among them that score the samples of the step."""
        return {name: part for name, part in self.rewards_at(step).items() if not part.held_out_only}

    def shadows_at(self, step: int) -> Mapping[str, ShadowPart]:
        """Shadows of those rewards."""
        revision = self._revision(step)
        return revision.set.shadows if revision else {}

    def rewards_number_at(self, step: int) -> int:
        """Number of a step's revision of the rewards; 0: as submitted."""
        revision = self._revision(step)
        return revision.number if revision else 0

    @property
    def rewards_number(self) -> int:
        """Number of the newest revision."""
        return self.state.revisions[-1].number if self.state.revisions else 0

    @property
    def first_unopened(self) -> int:
        return self.first_changed(unscored=False)

    def first_changed(self, *, unscored: bool, open_steps: bool = False) -> int:
        """First step to which a change of the rewards applies: the first not open, or one past the last version.

        With `unscored`, a paused job includes its newest open steps without any scored sample, with `open_steps` all
        whose request is not stored; after the last step, the validation that is due."""
        state, steps = self.state, self.steps
        takes_open = unscored and state.status is Status.PAUSED
        if state.version == steps:
            return steps if takes_open and state.validated < steps else steps + 1
        first = max(state.version, *(step + 1 for step in state.batches), 0)
        while takes_open and (batch := state.batches.get(first - 1)) is not None:
            if batch.ready or (batch.is_judged and not open_steps):
                break
            first -= 1
        return first

    def _revision(self, step: int) -> Revision | None:
        return next((r for r in reversed(self.state.revisions) if r.from_step <= step), None)

    def wanted(self, step: int, group: int) -> list[int]:
        """Indices of a group that it still lacks, ascending."""
        samples = self.state.batches[step].groups[group] if step in self.state.batches else {}
        return sorted(index for index, sample in samples.items() if sample.status == "wanted")

    def tries(self, step: int, group: int) -> set[tuple[int, int]]:
        """Indices as in `wanted`, each with the number of times that the sample was lost before."""
        samples = self.state.batches[step].groups[group] if step in self.state.batches else {}
        return {(index, sample.times_lost) for index, sample in samples.items() if sample.status == "wanted"}

    @property
    def _publish_due(self) -> bool:
        return (self.state.published, self.state.evaluated) != (self.state.version, self._evaluated_next)

    @property
    def _evaluated_next(self) -> bool:
        """True while the version is published in its evaluated weights: until it is validated. The last version keeps
        them, because nothing is sampled under it."""
        state = self.state
        is_open = state.validated < state.version or state.version == self.steps
        return self.spec.averages and self._is_validated(state.version) and is_open

    def _is_validated(self, version: int) -> bool:
        """True if the job validates this version."""
        every, last = self.spec.schedule.validate_every, self.steps
        return self.spec.data.is_validated and (version % every == 0 or version == last)

    @property
    def _validation_due(self) -> bool:
        published = self.state.published
        return published >= 0 and self._is_validated(published) and self.state.validated < published

    @property
    def _checkpoint_due(self) -> bool:
        state = self.state
        due = state.version % self.spec.schedule.save_every == 0 or state.version == self.steps
        return due and state.checkpointed < state.version

    @property
    def _is_exported(self) -> bool:
        """True if the model needs no export. An evaluation has none of its own."""
        return self.state.exported or self.spec.is_evaluation

    @property
    def _complete(self) -> bool:
        state, steps = self.state, self.steps
        done = state.version == state.published == state.checkpointed == steps and self._is_exported
        return done and not self._validation_due

    # -- parts of the fold -------------------------------------------------------------------------------------

    def _open_batches(self, at: float) -> None:
        """Opens a batch for each step that may be sampled under the published version."""
        if self.state.published < 0 or self.finished:
            return
        end = min(self.state.version + self.spec.schedule.max_staleness + 1, self.steps)
        for step in range(self.state.version, end):
            if step not in self.state.batches and self.state.published >= step - self.spec.schedule.max_staleness:
                rollout = self.spec.rollout
                self.state.batches[step] = Batch.opened(step, rollout.prompts_per_step, rollout.group_size, at)

    def _remember(self, lineage: str) -> None:
        """Remembers the new version; forgets versions that no checkpoint can have, and weights that no step may train
        on."""
        state, schedule = self.state, self.spec.schedule
        oldest = state.version - (schedule.keep_last + 1) * schedule.save_every
        state.history = {v: known for v, known in state.history.items() if v % schedule.save_every == 0 and v > oldest}
        if lineage:
            state.history[state.version] = lineage
        low = state.version - schedule.max_staleness
        state.weights = {version: known for version, known in state.weights.items() if version >= low}

    def _refill(self, batch: Batch, group: int) -> None:
        """Replaces a dropped sample of the group, if the settings allow. A given pair has no replacement."""
        used = batch.refills.get(group, 0)
        if self.spec.method.data == "prompts" and used < self.spec.rollout.max_refills:
            batch.add_sample(group)

    def _note_scored(self, step: int, at: float) -> None:
        batch = self.state.batches[step]
        if batch.phase is Phase.ADVANTAGE:
            batch.scored_at = at

    def _count_drop(self, reason: str, number: int = 1) -> None:
        self.state.samples_dropped = with_dropped(self.state.samples_dropped, str(reason), number)

    def _sample(self, step: int, group: int, index: int) -> SampleState | None:
        batch = self.state.batches.get(step)
        return None if batch is None else batch.groups.get(group, {}).get(index)
