"""Drives one job: starts what its state machine wants, makes what happened durable, folds it, and so on to the end.

    loop:   for command in machine.commands() − running: start it
            wait for a change
    emit:   stamp → ledger (durable) → machine.apply → notify

Nothing is remembered here that the ledger does not know, so a killed controller is continued by a new JobDriver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, assert_never

import grpc

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.data.blobs import WORKING_TTL_S
from flowfleet.data.streams import Delivery, TrajectoryConsumer
from flowfleet.errors import FlowfleetError, Unavailable, grpc_code
from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.model_files import FOLDER, model_folder
from flowfleet.process.clock import steady_time
from flowfleet.proto import common_pb2
from services.controller.concurrency import Changes, end, gather_or_cancel
from services.controller.job.commands.checkpoint import checkpoint
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import (
    Command,
    ComputeAdvantages,
    EnsureTrainer,
    Generate,
    Score,
    TrainStep,
    Validate,
)
from services.controller.job.machine.ledger import Also, Ledger
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from services.controller.job.recovery import losses
from services.controller.job.recovery.retries import MAX_FAILURES, TRAINER_COMMANDS, Decision, FailureAction, decide
from services.controller.job.reporting.counts import ProgressTold, counts_of
from services.controller.job.requests import misfit
from services.controller.job.step import TrainingStep
from services.controller.job.tracing import traced
from services.controller.job.trainer.watch import TrainerWatch
from services.controller.job.turn import Turn
from services.controller.reading.places import NotAllowed
from services.controller.store.records import reward_set
from services.controller.waiting import Check, NoPlace, NotYet, WaitedInVain

log = logging.getLogger(__name__)

TICK_S = 0.5
RENEW_EVERY_S = 3600.0
AT_ONCE = 256
"""Commands of a kind that run at once for a step, besides two for each replica; more would only wait."""
ENDS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""Codes of a call to a trainer that ends meanwhile: its termination message tells more."""
INTAKE_COUNT, INTAKE_BLOCK_MS = 256, 2000

MakeContext = Callable[[Machine, Callable[..., Awaitable[None]], Changes], JobContext]


class JobDriver:
    """Drives one running job."""

    def __init__(self, ledger: Ledger, machine: Machine, make: MakeContext) -> None:
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self._changes = Changes()
        self._running: dict[Command, asyncio.Task[None]] = {}
        self._failures: Counter[Command] = Counter()
        self._waits: Counter[Command] = Counter()
        self._reasons: dict[Command, str] = {}
        self._renewed = float("-inf")
        self._wake = asyncio.Event()
        self._reopens = self._is_held = False
        self._no_place: NoPlace | None = None
        self._reported: tuple[str, str] = ("", "")
        self._told = ProgressTold()
        self.machine = machine
        self.job = make(machine, self.emit, self._changes)
        self._loop = TrainingStep(self.job)
        self._turn = Turn(self.job.pool.turns, self.job.job_id, machine, self._wake.set)
        self._paused_at: float | None = None
        self._watch = TrainerWatch(self.job, machine, lambda: self._running)
        self._consumer = TrajectoryConsumer(self.job.redis, self.job.job_id, consumer="controller")

    async def run(self) -> Status:
        """Runs the job to its end and returns how it ended. Cancelled, it stops and leaves the job to be continued.

        Raises NoPlace for a job that returns to the queue.
        """
        parts = (self._intake, self._tick, self._watch.run)
        background = [asyncio.create_task(part(), name=part.__qualname__) for part in parts]
        for task in background:
            task.add_done_callback(self._wake_up)
        self._tell_weights()
        try:
            while not self.machine.finished:
                self._wake.clear()
                if self._start_wanted():
                    await self._look_at_replicas()
                await self._report_status()
                await self._next_change(background)
                if self._reopens:
                    raise Unavailable("it is opened again")
                if self._no_place is not None:
                    raise self._no_place
        finally:
            await end([*background, *self._running.values()])
            self._turn.leave()
        await self._report_end()
        return self.machine.state.status

    async def hold(self, reason: str) -> None:
        """Pauses the job for an input that it was opened with. When it is resumed, `run` ends, so that it is opened
        again."""
        self._is_held = True
        await self.job.pause(reason)

    async def emit(self, *events: ev.Event, also: Also | None = None) -> None:
        """Makes events durable, together with what `also` adds to the transaction, then folds them."""
        async with self._lock:
            stamped = [event.model_copy(update={"at": steady_time()}) for event in events]
            await self._ledger.append(stamped, also)
            for event in stamped:
                self.machine.apply(event)
            reopens = any(isinstance(event, ev.Rewound | ev.StepsChanged) for event in stamped)
            reopens = reopens or (self._is_held and any(isinstance(event, ev.ResumeRequested) for event in stamped))
            self._reopens = self._reopens or reopens
            if any(isinstance(event, ev.Trained) for event in stamped):
                await self._ledger.snapshot(self.machine.state)
        if any(isinstance(event, ev.Published) for event in events):
            self._tell_weights()
        self._wake.set()
        self._changes.notify()

    # -- commands ----------------------------------------------------------------------------------------------

    def _start_wanted(self) -> bool:
        """True if the job has got its turn at the replicas, which may serve another job's weights."""
        for command in [command for command, task in self._running.items() if task.done()]:
            self._running.pop(command).result()
        most, had_turn = AT_ONCE + 2 * self.job.pool.size, self._turn.is_ours
        startable = self._turn.startable(self.machine.commands(most), self._running)
        for command in sorted(startable - self._running.keys(), key=str):
            self._running[command] = task = asyncio.create_task(self._attempt(command), name=str(command))
            task.add_done_callback(self._wake_up)
        return self._turn.is_ours and not had_turn

    async def _attempt(self, command: Command) -> None:
        """Tries a command once. After a failure it stays `running` for the delay, so that it is not started at once."""
        self._watch.accusation(command)  # of an earlier try that did not fail by it
        try:
            with traced(self.job.job_id, self.machine, command):
                await self._loop.run(command)
            self._went_well(command)
        except NotYet as waiting:
            log.info("%s: %s", command, waiting, extra={"job": self.job.job_id})
            self._waits[command] += 1
            tries = MAX_FAILURES if isinstance(waiting, WaitedInVain) else self._waits[command]
            self._explain(command, tries, str(waiting))
            await asyncio.sleep(waiting.again_s)
        except NoPlace as error:
            self._no_place = error
        except NotAllowed as error:
            await self._pause(f"{error}; then `flowfleet resume` the job")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            await self._failed(command, grpc.StatusCode.CANCELLED, "the call's channel was closed")
        except grpc.aio.AioRpcError as error:
            await self._failed(command, error.code(), error.details() or "")
        except (FlowfleetError, ValueError, TimeoutError, RuntimeError) as error:
            await self._failed(command, grpc_code(error), str(error) or type(error).__name__)

    async def _failed(self, command: Command, code: grpc.StatusCode, message: str) -> None:
        if code in losses.CODES and await losses.make_again(self.job, command, message):
            self._went_well(command)
            return
        if accusation := self._watch.accusation(command):
            code, message = grpc.StatusCode.INTERNAL, accusation
        elif code in ENDS and isinstance(command, TRAINER_COMMANDS):
            words = await self.job.trainer.termination_message()
            code, message = (grpc.StatusCode.INTERNAL, f"the trainer ended: {words}") if words else (code, message)
        self._failures[command] += 1
        decision = decide(command, code, self._failures[command])
        log.warning(
            "%s failed (%d): %s: %s → %s", command, self._failures[command], code.name, message, decision.action,
            extra={"job": self.job.job_id},
        )  # fmt: skip
        if decision.action is FailureAction.FAIL_JOB and isinstance(command, EnsureTrainer) and self._has_begun:
            await self._pause(f"the trainer no longer starts: {message}; mend that, then `flowfleet resume` the job")
            return
        self._explain(command, self._failures[command], message)
        await self._act(command, decision, f"{type(command).__name__}: {message}")

    @property
    def _has_begun(self) -> bool:
        """A trainer has worked for the job: what it cannot start from now has changed since."""
        return self.machine.state.published >= 0

    def _went_well(self, command: Command) -> None:
        self._failures.pop(command, None)
        self._waits.pop(command, None)
        self._reasons.pop(command, None)

    def _explain(self, command: Command, tries: int, why: str) -> None:
        """Makes a repeated failure the job's reason, until the command works or is no longer wanted."""
        if tries >= MAX_FAILURES:
            self._reasons[command] = f"{type(command).__name__} is tried again: {why}"
            self._wake.set()

    async def _act(self, command: Command, decision: Decision, reason: str) -> None:
        match decision.action:
            case FailureAction.FAIL_JOB:
                await self.emit(ev.Failed(reason=reason))
            case FailureAction.GIVE_UP:
                await self._give_up(command, reason)
            case FailureAction.REPLACE:
                await self._watch.replace(reason)
                self._watch.accusation(command)  # it has failed already
                await asyncio.sleep(decision.delay_s)
            case FailureAction.RESYNC:
                await asyncio.sleep(decision.delay_s)
                if self._failures[command] >= MAX_FAILURES and isinstance(command, EnsureTrainer | TrainStep):
                    await self.job.trainer.stop()  # it answers, but cannot do this: start afresh
                await self._lose_trainer()
            case FailureAction.RETRY:
                await asyncio.sleep(decision.delay_s)
            case _:
                assert_never(decision.action)

    async def _lose_trainer(self) -> None:
        """Also ends calls to a trainer that is gone, so that its silence does not count against the next one."""
        if not await self.job.trainer.alive():
            await self.job.trainer.drop()
        await self.emit(ev.TrainerLost())

    async def _give_up(self, command: Command, reason: str) -> None:
        """Drops what the command was for; the reason is in the log and in the job's events. Of several groups asked for
        together only those are dropped that fail alone as well: one bad file costs its own group."""
        self._went_well(command)
        if isinstance(command, Generate):
            alone = [Generate(command.step, (g,)) for g in command.groups if self.machine.wanted(command.step, g)]
            if len(alone) > 1:
                await gather_or_cancel(self._attempt_to_the_end(single, command) for single in alone)
                return
        await self.job.store.events.append(self.job.job_id, "gave_up", {"command": str(command), "reason": reason})
        match command:
            case Generate(step, groups):
                lost = [(group, index) for group in groups for index in self.machine.wanted(step, group)]
                await self.emit(
                    *(
                        ev.Dropped(step=step, group=g, index=i, reason=DropReason.ROLLOUT_FAILED, cause=reason)
                        for g, i in lost
                    )
                )
            case Score(step, group):
                samples = self.machine.state.batches[step].groups[group].items()
                lost_indices = [index for index, sample in samples if sample.status == "sampled"]
                await self.emit(
                    *(
                        ev.Dropped(step=step, group=group, index=i, reason=DropReason.REWARD_FAILED, cause=reason)
                        for i in lost_indices
                    )
                )
            case Validate(version) if not self.machine.spec.is_evaluation:
                await self.emit(ev.Validated(version=version, reward=None))
            case _:
                await self.emit(ev.Failed(reason=reason))

    async def _attempt_to_the_end(self, single: Generate, command: Generate) -> None:
        """Tries `single`, a part of `command`, until its group has its samples or they are dropped, as long as
        `command` is wanted."""
        while command in self.machine.commands() and self.machine.wanted(single.step, *single.groups):
            await self._attempt(single)

    # -- what comes in -----------------------------------------------------------------------------------------

    async def _intake(self) -> None:
        """Trajectories from the stream: reference, event and acknowledgment are one transaction."""
        pending = await self._consumer.reclaim(INTAKE_COUNT, min_idle_ms=0)  # what a killed controller held
        while True:
            while pending:
                await self._take(pending)
                pending = await self._consumer.reclaim(INTAKE_COUNT)
            pending = await self._consumer.read(INTAKE_COUNT, INTAKE_BLOCK_MS)

    async def _take(self, deliveries: list[Delivery]) -> None:
        taken = [delivery for delivery in deliveries if not await self._buried(delivery)]
        training = [d.sample for d in taken if d.sample.purpose == common_pb2.PURPOSE_TRAIN]

        async def also(pipe: Any) -> None:
            """Asks the machine here, where nothing else is folded before the facts are."""
            await self.job.refs.put(self._welcome(training), pipe)
            await self._consumer.ack([delivery.entry_id for delivery in taken], pipe)

        facts = [
            ev.Sampled(
                step=s.id.step, group=s.id.group, index=s.id.index, version=s.policy_version, digest=s.weights_digest
            )
            for s in training
        ]
        await self.emit(*facts, also=also)

    async def _buried(self, delivery: Delivery) -> bool:
        """Makes a training sample that was not requested in this form a dead letter; True if it did."""
        if delivery.sample.purpose != common_pb2.PURPOSE_TRAIN or not (why := misfit(self.job, delivery.sample)):
            return False
        log.warning("sample rejected: %s", why, extra={"job": self.job.job_id})
        await self._consumer.bury(delivery, why)
        return True

    def _welcome(self, training: list[common_pb2.Sample]) -> list[common_pb2.Sample]:
        """Samples that the machine will count as sampled."""
        groups = {(s.id.step, s.id.group) for s in training}
        still = {(*group, index) for group in groups for index in self.machine.wanted(*group)}
        return [
            s
            for s in training
            if (s.id.step, s.id.group, s.id.index) in still
            and self.machine.admissible(s.id.step, s.policy_version)
            and self.machine.published_as(s.policy_version, s.weights_digest)
        ]

    async def _tick(self) -> None:
        """Polls for changes without a notification: the trainer's death, replicas that are behind, requested changes,
        aging blobs."""
        while True:
            await self._look_at_wishes()
            await self._look_at_memory()
            await self._look_at_pause()
            state = self.machine.state
            if state.trainer_version is not None and not await self.job.trainer.alive():
                log.warning("trainer ended unexpectedly", extra={"job": self.job.job_id})
                await self._watch.ended()
                if not await self.job.trainer.alive():  # else a call that broke has started the next one meanwhile
                    await self._lose_trainer()
            elif state.status is Status.PAUSED and not self.job.trainer.placed():
                await self.job.trainer.stop(at_once=True)  # pods that hold nodes and wait for others
            await self._look_at_replicas()
            if time.monotonic() - self._renewed > RENEW_EVERY_S:
                await self.job.refs.renew(WORKING_TTL_S)
                self._renewed = time.monotonic()
            await asyncio.sleep(TICK_S)

    async def _look_at_wishes(self) -> None:
        paused = self.machine.state.status is Status.PAUSED  # before the wish is read: see Store.hold
        desired, revision, steps = await self.job.store.jobs.desired_state(self.job.job_id)
        if desired is Desired.CANCELLED:
            await self.emit(ev.CancelRequested())
        elif desired is Desired.PAUSED and not paused:
            await self.emit(ev.PauseRequested())
        if revision > self.machine.rewards_number and not await self._change_rewards():
            return  # before the job is resumed, and open steps are no longer as the change wants them
        if desired is Desired.PAUSED:
            self.job.mending.wait_for(None)  # its user resumes it
        if desired is Desired.RUNNING and paused and self.job.mending.is_over():
            self.job.scoring.rewards.reset()
            self.job.trainer.rewards.reset()
            await self.emit(ev.ResumeRequested())
        if steps is not None and steps != self.machine.state.steps_asked:
            await self.emit(ev.StepsChanged(steps=steps))

    async def _look_at_replicas(self) -> None:
        """In the job's turn replicas must serve its weights: those that are new or served another job get them."""
        state = self.machine.state
        is_published = self._turn.is_ours and state.published >= 0
        if is_published and self.job.pool.behind(state.published, evaluated=state.evaluated):
            await self.emit(ev.ReplicaBehind())

    async def _look_at_pause(self) -> None:
        """Saves a job that has been paused for a while, and gives the places of its trainer to others."""
        if self.machine.state.status is not Status.PAUSED:
            self._paused_at = None
            return
        now = time.monotonic()
        self._paused_at = now if self._paused_at is None else self._paused_at
        is_due = now - self._paused_at >= self.machine.spec.pause.release_s
        if not is_due or not self.job.trainer.is_admitted or any(not task.done() for task in self._running.values()):
            return
        state = self.machine.state
        try:
            if state.trainer_version == state.version > state.checkpointed:
                await checkpoint(self.job, state.version)
        except (grpc.aio.AioRpcError, NotYet) as error:  # it resumes from an older one, and repeats what came after
            log.warning("could not save the paused job: %s", error, extra={"job": self.job.job_id})
        await self.job.trainer.leave()
        await self.emit(ev.TrainerLost())

    async def _look_at_memory(self) -> None:
        """Pauses the job while Redis still has room for that, until it has more."""
        if reason := await self.job.memory.pause_reason():
            await self._pause(reason, self.job.memory.has_room)

    async def _pause(self, reason: str, until: Check | None = None) -> None:
        """Pauses the job as `JobContext.pause`."""
        if self.machine.finished or self.machine.state.status is Status.PAUSED:
            return
        log.warning("job paused: %s", reason, extra={"job": self.job.job_id})
        await self.job.pause(reason, until)

    async def _change_rewards(self) -> bool:
        """Makes the user's newest wish a fact, from the first step on that is not open when it is recorded. While the
        job is paused also open steps have it that are not scored, or all where the wish says so: it waits for the
        scoring that was begun before. False while it waits."""
        wish = await self.job.store.rewards.pending(self.job.job_id)
        is_paused = self.machine.state.status is Status.PAUSED
        if wish is None:
            return True
        if is_paused and self._is_scoring:
            return False
        whole = wish.open_steps and is_paused

        asked = reward_set(wish)

        async def also(pipe: Any) -> None:
            first = self.machine.first_changed(unscored=is_paused, open_steps=whole)
            applied = wish.model_copy(update={"from_step": first})
            is_break = asked.rewards != self.machine.rewards_at(first)
            await self.job.store.rewards.apply(self.job.job_id, applied, pipe, is_break=is_break)

        change = ev.RewardsChanged(number=wish.number, set=asked, unscored=is_paused, open_steps=whole)
        await self.emit(change, also=also)
        self.job.mending.wait_for(None)
        return True

    @property
    def _is_scoring(self) -> bool:
        scoring = (Score, ComputeAdvantages, Validate)
        return any(isinstance(command, scoring) and not task.done() for command, task in self._running.items())

    # -- the loop's own ----------------------------------------------------------------------------------------

    async def _next_change(self, background: list[asyncio.Task[None]]) -> None:
        """Waits until an event is folded, a command ends, or a while passes. A background task's error ends the run."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        for task in background:
            if task.done():
                task.result()

    def _wake_up(self, _: asyncio.Task[None]) -> None:
        self._wake.set()

    def _tell_weights(self) -> None:
        """Which weights of the job may be sampled with: the fleet's watch lends no replica that serves others."""
        self.job.pool.verified(self.machine.published_as)

    async def _report_status(self) -> None:
        """Tells a new status, reason or phase at once, and how far the step is now and then."""
        if self.machine.finished:
            return
        state, phase = self.machine.state, str(self.machine.phase)
        status, reason = str(state.status), state.reason or self._reason()
        if (status, reason) != self._reported:
            await self.job.store.jobs.set_status(self.job.job_id, JobStatus(status), reason)
            self._reported = (status, reason)
        counts = counts_of(state.batches.get(state.version))
        if (announce := self._told.tells(phase, counts)) is not None:
            facts = {"phase": phase, "steps": self.machine.steps, **counts._asdict()}
            await self.job.store.jobs.update_progress(self.job.job_id, announce=announce, **facts)

    def _reason(self) -> str:
        """Why a command keeps failing, or which ranks are silent. Commands no longer wanted are forgotten, but not
        those that only wait for the trainer to be found again."""
        if self._reasons and self.machine.state.trainer_version is not None:
            wanted = self.machine.commands()
            self._reasons = {command: why for command, why in self._reasons.items() if command in wanted}
        return min(self._reasons.values(), default=self._watch.doubt)

    async def _report_end(self) -> None:
        """Writes results, then the status, which ends the job's events, and then deletes working data."""
        state, job = self.machine.state, self.job
        await job.trainer.stop_for_good()
        model = job.directory / FOLDER if state.exported else await asyncio.to_thread(model_folder, job.directory)
        results = {
            "model": str(model) if model else None,
            "held_out_reward": state.held_out_reward,
            "samples_trained": state.samples_trained,
            "samples_dropped": state.samples_dropped,
            "drop_causes": state.drop_causes,
            "duplicates": state.duplicates,
        }
        await job.store.jobs.update_progress(job.job_id, phase=str(self.machine.phase), eta_s=0.0)
        await job.store.jobs.set_results(job.job_id, results)
        await job.store.jobs.set_status(job.job_id, JobStatus(state.status), state.reason)
        await job.forget()
        await self._ledger.forget()
