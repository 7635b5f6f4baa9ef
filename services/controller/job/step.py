"""One training step, whatever the algorithm and the model, as the controller drives it.

    command            wanted when                                       does                         ends with
    EnsureTrainer      no trainer is known                               finds or starts the trainer  TrainerReady
    Generate           a group lacks samples and a fit version serves    samples them on one replica  Sampled
    Score              a complete group lacks scores                     asks the rewards             Scored, Dropped
    ComputeAdvantages  every sample of a step is scored or dropped       stores the request to train  AdvantagesReady
    TrainStep          the next step has its request, or a trainer lags  updates, or replays          Trained
    Publish            a replica lacks the newest version                brings it to every replica   Published
    Checkpoint         `save_every` or the last step asks for it         saves the trainer            Checkpointed
    Validate           `validate_every` or the last step asks for it     scores held-out prompts      Validated
    Export             the last version is published and saved           writes the model             Exported

Algorithms differ only in their requests (requests.py), in each sample's advantage or place in a pair (credit.py) and in
data given instead of sampled (prompts/inputs.py, in services/controller).

Each method below does one command of the state machine (state_machine.py), which decides when, and emits its event
(events.py). The driver (driver.py) emits Sampled as samples arrive, and retries failed commands. Every method is
idempotent: it may run again after a crash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never

import grpc

from flowfleet.data.lineage import follow
from flowfleet.process.telemetry import LOG_PROB_GAP, LOG_PROB_NOT_FINITE
from flowfleet.proto import trainer_pb2
from services.controller.fleet.replicas import Replica
from services.controller.job import requests
from services.controller.job.commands.drawing import draw
from services.controller.job.commands.previews import Previews
from services.controller.job.commands.validation import Validation
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.machine.state_machine import (
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
from services.controller.job.recovery.position import ledger_position
from services.controller.job.recovery.resumption import resumed
from services.controller.job.reporting.card import training_card
from services.controller.job.reporting.figures import weighed
from services.controller.rewards.failures import RewardPause
from services.controller.rewards.job_rewards import preference
from services.controller.waiting import NotYet

INTAKE_DEADLINE_S = 30.0


class TrainingStep:
    def __init__(self, job: JobContext) -> None:
        self.job = job
        self._validation, self._previews = Validation(job), Previews(job)
        self._updating = asyncio.Lock()
        """Held while the trainer updates, and while its own ranks lack a version that rollouts have."""

    async def run(self, command: Command) -> None:
        """Runs one command to its event. Remote errors pass through."""
        try:
            await self._run(command)
        except RewardPause as pause:
            await self.pause(str(pause))

    async def pause(self, reason: str) -> None:
        """Pauses the job until the user resumes it; commands that are still wanted then start again."""
        await self.job.emit(ev.PauseRequested(reason=reason), also=partial(self.job.store.jobs.hold, self.job.job_id))

    async def _run(self, command: Command) -> None:
        match command:
            case EnsureTrainer():
                await self.ensure_trainer()
            case Generate(step, groups):
                await self.generate(step, groups)
            case Score(step, group):
                await self.score(step, group)
            case ComputeAdvantages(step):
                await self.advantages(step)
            case TrainStep(step):
                async with self._updating:
                    await self.train(step)
            case Publish(version, evaluated):
                await self.publish(version, evaluated)
            case Checkpoint(version):
                await self.checkpoint(version)
            case Validate(version):
                await self.validate(version)
            case Export():
                await self.export()
            case _:
                assert_never(command)

    async def ensure_trainer(self) -> None:
        """Find or start the trainer; it resumes from its newest checkpoint that goes with the ledger."""
        job = self.job
        address = await job.trainer.ensure()
        request = trainer_pb2.ConfigureRequest(
            job_id=job.job_id,
            spec_json=job.spec.model_dump_json(),
            directory=str(job.directory / "checkpoints"),
            ledger=await ledger_position(job),
        )
        job.trainer.connect(address)
        try:
            configured = await job.trainer.stub().Configure(request, timeout=job.spec.timeouts.checkpoint_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DATA_LOSS:
                raise
            await self.pause(error.details() or "")
            return
        if configured.misfit:
            await job.trainer.stop()
            raise NotYet(f"the trainer restarts from a checkpoint: {configured.misfit}")
        await job.emit(await resumed(job, configured))

    async def generate(self, step: int, groups: Sequence[int]) -> None:
        """Sample what these groups lack, on one replica that serves an admissible version, once previews have chosen it
        where the job has them. Given preferences are only encoded."""
        job = self.job
        await self._previews.choose(step, groups)
        wanted = {group: job.machine.wanted(step, group) for group in groups}
        tries = {group: job.machine.tries(step, group) for group in groups}
        request, prompts = requests.generate(job, step, wanted), job.prompts(step)
        if not request.groups:
            return
        # samples arrive through the Redis stream as well: see JobDriver
        oldest = max(0, step - job.spec.schedule.max_staleness)
        await draw(job, request, [prompts[group.group] for group in request.groups], oldest, step)
        async with asyncio.timeout(INTAKE_DEADLINE_S):
            await job.until(lambda: not any(asked & job.machine.tries(step, g) for g, asked in tries.items()))

    async def score(self, step: int, group: int) -> None:
        """Send a complete group's pictures to every reward of the job. Preferences already name the better sample."""
        samples = await self.job.samples(step, group, "sampled")
        prompt = self.job.prompts(step)[group]
        rewards = self.job.rewards(prompt, step)
        if self.job.spec.method.data == "preferences":
            verdicts = [preference(sample.id.index) for sample in samples]
        else:
            verdicts = await self.job.scoring.score(samples, [prompt] * len(samples), rewards, step)
        await self.job.reports.scored(samples, [prompt] * len(samples), verdicts)
        facts = [requests.scored_or_dropped(self.job.spec, *pair) for pair in zip(samples, verdicts, strict=True)]
        if any(isinstance(fact, ev.Dropped) for fact in facts) and await self.job.scoring.group_rewards(rewards):
            # disables refilling: a replacement would be scored outside its group
            facts = [f.model_copy(update={"refill": False}) if isinstance(f, ev.Dropped) else f for f in facts]
        await self.job.emit(*facts)

    async def advantages(self, step: int) -> None:
        """Compute how much better each sample is than its group, and store the request for the trainer.

        Without pairs that differ the request is empty: the trainer counts the step and learns nothing. A step without
        any score gives an empty request too, and pauses the job."""
        job = self.job
        batch, rewards = job.machine.state.batches[step], job.machine.training_rewards_at(step)
        credits, figures, spread = await asyncio.to_thread(weighed, job.spec, rewards, batch)
        request = await requests.train_step(job, step, credits)
        ready = ev.AdvantagesReady(step=step, num_samples=len(credits), figures=figures, spread=spread)
        facts: list[ev.Event] = [ready]
        if is_empty := not batch.has("scored"):
            facts.append(ev.PauseRequested(reason=_nothing_to_learn(step)))

        async def also(pipe: Any) -> None:
            await job.refs.put_request(request, pipe)
            if is_empty:
                await job.store.jobs.hold(job.job_id, pipe)

        await job.emit(*facts, also=also)

    async def train(self, step: int) -> None:
        """Update the model once. The trainer records each step, so a repeated request changes nothing."""
        job = self.job
        request = await job.load_train_request(step)
        with job.pool.updating():
            result = await job.trainer.train(request)
        if step == job.machine.state.version:
            await job.reports.trained(request, result)
        trained = ev.Trained(
            step=step,
            log_prob_gap=result.metrics.get(LOG_PROB_GAP),
            log_prob_not_finite=result.metrics.get(LOG_PROB_NOT_FINITE, 0.0),
            lineage=await asyncio.to_thread(follow, dict(job.machine.state.history), request),
        )
        hold = partial(job.store.jobs.hold, job.job_id) if job.machine.too_far(trained) else None
        await job.emit(trained, also=hold)

    async def publish(self, version: int, evaluated: bool) -> None:
        """Give every live replica the new weights; each verifies them before it serves them. Rollouts sample with them
        while the trainer's own ranks still end a batch, and no update comes between the two."""
        job, spec = self.job, self.job.spec
        pools = job.pool.rollouts_first()
        if not pools:
            raise NotYet(job.pool.nobody_there())
        if spec.trainer.deterministic and spec.loss.traits.has_step_ratio and (split := _split(job.pool.live())):
            await self.pause(split)
            return
        started, responses = time.monotonic(), list[trainer_pb2.PublishWeightsResponse]()

        async def give(replicas: Sequence[Replica]) -> None:
            request = trainer_pb2.PublishWeightsRequest(job_id=job.job_id, version=version, evaluated=evaluated)
            request.replicas.extend(trainer_pb2.Replica(replica_id=r.replica_id, address=r.address) for r in replicas)
            responses.append(await job.trainer.stub().PublishWeights(request, timeout=spec.timeouts.publish_s))
            job.pool.mark_suspect(result.replica_id for result in responses[-1].results if not result.ok)
            await job.pool.refresh()
            job.reports.published(responses, time.monotonic() - started)

        async def tell() -> None:
            if any(result.ok for result in responses[-1].results):
                digest = responses[-1].weights_digest
                await job.emit(ev.Published(version=version, evaluated=evaluated, digest=digest))

        with job.pool.updating():
            await give(pools[0])
            async with self._updating:
                if version != job.machine.state.version:
                    return
                await tell()
                for ranks in pools[1:]:
                    await give(ranks)
                    await tell()
        results = [result for response in responses for result in response.results]
        if not any(result.ok for result in results):
            raise NotYet(f"no replica received version {version}: {results[0].error}")

    async def checkpoint(self, version: int) -> None:
        """Save the trainer, and release the blobs of steps that all of the newest checkpoints cover."""
        job = self.job
        card, best = await training_card(job), await job.reports.best_before(version)
        request = trainer_pb2.SaveCheckpointRequest(job_id=job.job_id, card=card, keep=best)
        saved = await job.trainer.stub().SaveCheckpoint(request, timeout=job.spec.timeouts.checkpoint_s)
        await job.reports.checkpointed(saved.applied_steps, saved.path, best)
        await job.emit(ev.Checkpointed(version=saved.applied_steps))
        newest = (await job.store.history.checkpoints(job.job_id))[-job.spec.schedule.keep_last :]
        await job.refs.release_before(min(checkpoint.step for checkpoint in newest))

    async def validate(self, version: int) -> None:
        """Sample the held-out prompts without noise, from the same seeds each time, and score them."""
        validated = await self._validation.run(version)
        hold = partial(self.job.store.jobs.hold, self.job.job_id) if self.job.machine.pause_reason(validated) else None
        await self.job.emit(validated, also=hold)

    async def export(self) -> None:
        """Write the trained model as files that diffusers loads."""
        job = self.job
        card, directory = await training_card(job), str(job.directory / "model")
        request = trainer_pb2.ExportModelRequest(job_id=job.job_id, directory=directory, card=card)
        await job.trainer.stub().ExportModel(request, timeout=job.spec.timeouts.checkpoint_s)
        await job.emit(ev.Exported())


def _split(replicas: Sequence[Replica]) -> str:
    """Reason to pause a deterministic job, if there is one."""
    for replica in replicas:
        if replica.num_devices > 1:
            return (
                f"trainer.deterministic recomputes the rollout's log-probs bit for bit, but {replica.num_devices} "
                f"devices of replica {replica.replica_id} share each sample, which rounds otherwise: submit the job "
                "with trainer.deterministic = false, or give the pool replicas of one device each and resume the job"
            )
    return ""


def _nothing_to_learn(step: int) -> str:
    return (
        f"step {step}: no sample has a score, so there is nothing to learn from it; samples_dropped has the reasons. "
        "Fix the reward services, or change them with `flowfleet rewards`, and resume the job: it continues with the "
        "next step"
    )
