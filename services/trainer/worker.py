"""Executor of commands on one rank. All ranks execute the same commands in the same order; rank 0's results count."""

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.lineage import misfit
from flowfleet.errors import Conflict, DataLoss, FlowfleetError, Unavailable
from flowfleet.hardware import devices
from flowfleet.job.fingerprints import change, fingerprints, inputs_of
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.process.logs import copy_to
from flowfleet.process.telemetry import Timings
from flowfleet.proto import trainer_pb2
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.proto.rollout_pb2 import Bucket
from flowfleet.redis import keys
from flowfleet.rewards.failures import RewardRefused, RewardUnavailable, reward_of
from flowfleet.weights import lora, weights
from flowfleet.weights.transfer import TransferError, TransferMember
from services.trainer.beats import Phase
from services.trainer.checkpoints.checkpoints import Checkpoints
from services.trainer.checkpoints.set_aside import kept_aside
from services.trainer.commands import Command, Kind
from services.trainer.export import About, export, model_bytes, write_model
from services.trainer.model.engine import Engine, num_threads
from services.trainer.model.gather import Gather
from services.trainer.parallel.ranks import Ranks
from services.trainer.record import Record
from services.trainer.step.batches import Update
from services.trainer.step.gradients.client import GradientClient
from services.trainer.step.gradients.gradients import RewardGradients
from services.trainer.step.gradients.store import release
from services.trainer.step.inputs import Batch, Reader
from services.trainer.step.kinds import plan, reader_of
from services.trainer.step.mfu import Mfu
from services.trainer.step.profiler import recorded
from services.trainer.step.requests import check_request, pairs_of
from services.trainer.step.update import StepTrainer
from services.trainer.turns import Turns

ADAPTER_TTL_S = 24 * 3600
_ADAPTERS_KEPT = 3
_GIB = 2**30

_PHASES = {
    Kind.CONFIGURE: Phase.LOAD,
    Kind.SAVE: Phase.CHECKPOINT,
    Kind.EXPORT: Phase.CHECKPOINT,
    Kind.SEND_WEIGHTS: Phase.OUTSIDE,
}
"""Phase of a command outside the parts that declare a phase themselves."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """Weights of one version, ready to be loaded."""

    version: int
    hashes: dict[str, int]
    bytes: int
    adapter: BlobRef | None = None
    evaluated: bool = False
    """The version's evaluated weights; else those that sample."""

    @property
    def digest(self) -> str:
        return weights.digest(self.hashes)

    def is_of(self, request: trainer_pb2.PublishWeightsRequest) -> bool:
        """Returns True if these are the weights that the request asks for."""
        return (self.version, self.evaluated) == (request.version, request.evaluated)


@dataclass
class Job:
    """State of the configured job; `configure` makes it."""

    job_id: str
    spec: JobSpec
    engine: Engine
    reader: Reader
    checkpoints: Checkpoints
    record: Record
    mfu: Mfu
    resumed_from: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Setting → fingerprint of what it named when the job began."""
    adapters: list[Published] = field(default_factory=list)
    """Blobs of the newest versions, rank 0 only."""


class Worker:
    """`member` is rank 0's way to the replicas; the publisher sets it before SEND_WEIGHTS. `on_configured` is called
    with the job after each CONFIGURE."""

    def __init__(self, ranks: Ranks, blobs: SyncBlobs) -> None:
        self.ranks = ranks
        self.job: Job | None = None
        self.member: TransferMember | None = None
        self.on_configured: Callable[[Job], None] = lambda job: None
        self.turns = Turns()
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop of another thread, on which rewards are called; without one, such a thread is made."""
        self._client: GradientClient | None = None
        self._shared: dict[str, Tensor] = {}
        self._blobs = blobs
        self._identity: tuple[str, ...] = ()

    def execute(self, command: Command) -> Any:
        """Calls the method of the command's name. Raises a FlowfleetError where nothing has changed; any other
        exception means that the rank must end."""
        handler: Any = getattr(self, command.kind.name.lower())
        message: Message | None = command.message
        with self.ranks.beats.phase(_PHASES.get(command.kind, Phase.WORK)):
            return handler(message)

    def configure(self, request: trainer_pb2.ConfigureRequest) -> trainer_pb2.ConfigureResponse:
        """Loads the model and the newest checkpoint that is what was written and goes with the ledger; none, where all
        are lost. A trainer that is configured already says whether its weights go with the ledger."""
        reason = ""
        if self.job is None:
            while self.job is None:
                self.job = self._loaded(request)
            self._identity = _identity(request)
        elif _identity(request) != self._identity:
            raise Conflict(
                f"this trainer belongs to job {self.job.job_id} as it was first configured: start another for another "
                "job or specification"
            )
        else:
            reason = _judge(request)(self.job.record)
        with self.ranks.together():
            self.on_configured(self.job)
        return trainer_pb2.ConfigureResponse(
            applied_steps=self.job.record.version,
            world_size=self.ranks.world_size,
            resumed_from=self.job.resumed_from,
            misfit=reason,
            set_aside=[checkpoint.told() for checkpoint in kept_aside(Path(request.directory))],
            samples=self.job.record.samples,
        )

    def train(self, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepResponse:
        """Applies the next step; what may fail by the fault of others comes before the first change."""
        job = self._configured(request.job_id)
        torch.set_num_threads(num_threads(job.spec, self.ranks))
        timings = Timings()
        with timings("load_samples"), self.ranks.together():
            sample_keys = check_request(request, job.spec)
            if not sample_keys:
                return self._passed_over(job, request)
            pairs = pairs_of(request, job.spec)
            place = request.step, job.engine.mesh.num_parts
            passes = plan(request.samples, sample_keys, pairs, job.spec, place)
            with self.ranks.beats.phase(Phase.OUTSIDE):
                job.reader.read(request, passes[0], job.engine.mesh.part(self.ranks.rank))
            batches = self._batches(job, passes[0])
        sde_steps = request.samples[0].sample.sde_steps if job.spec.records_steps else ()
        rewards = self._gradients(job, request) if job.spec.trains_on_gradients else None
        trainer = StepTrainer(job.engine, request.step, len(sample_keys), sde_steps, rewards)
        later = ((updates, self._batches(job, updates)) for updates in passes[1:])
        try:
            folder = job.checkpoints.directory.parent / "profiles"
            profiling = recorded(folder, request.step, self.ranks) if request.profile else nullcontext()
            with self._turn(), profiling:
                metrics = trainer.train(chain([(passes[0], batches)], later), timings)
                ratios = trainer.sample_ratios()
        except FlowfleetError as failure:  # before the first change
            job.reader.clear()
            log.warning("step not applied: %s", failure, extra=_extra(request))
            if not isinstance(failure, RewardRefused | RewardUnavailable):
                raise
            return trainer_pb2.TrainStepResponse(
                step=request.step,
                reward_failure=str(failure),
                failed_reward=reward_of(failure) or request.gradient_rewards[0].name,
                is_permanent=isinstance(failure, RewardRefused),
            )
        metrics |= job.mfu.metrics(batches, trainer.num_rounds, timings.seconds)
        job.reader.clear()
        self._recorded(job, request, metrics, sum(map(len, passes)), timings)
        response = step_response(job.record, request.step, replayed=False)
        response.ratios.extend(ratios)
        return response

    def save(self, request: trainer_pb2.SaveCheckpointRequest) -> trainer_pb2.SaveCheckpointResponse:
        job = self._configured(request.job_id)
        about = About(job.job_id, job.record.version, request.card)
        is_full, write = not job.engine.is_lora, None
        if not is_full or job.spec.schedule.save_full:
            write = partial(write_model, job.engine, about=about)
        size = model_bytes(job.engine) if write else 0
        path = job.checkpoints.save(job.engine, job.record, write, model_bytes=size, keep=request.keep)
        if self.ranks.rank == 0 and job.spec.trains_on_gradients:
            release(job.checkpoints.directory, job.checkpoints.oldest)
        return trainer_pb2.SaveCheckpointResponse(applied_steps=job.record.version, path=str(path))

    def export(self, request: trainer_pb2.ExportModelRequest) -> trainer_pb2.ExportModelResponse:
        job = self._configured(request.job_id)
        about = About(job.job_id, job.record.version, request.card)
        path = export(job.engine, Path(request.directory), job.checkpoints.fence, about)
        return trainer_pb2.ExportModelResponse(path=str(path))

    def gather_adapter(self, request: trainer_pb2.PublishWeightsRequest) -> Published | None:
        """Rank 0 stores the adapter of the applied version as a blob, once; the other ranks help to gather it."""
        job = self._configured(request.job_id)
        gather = job.engine.gather(evaluated=request.evaluated)
        published: Published | None = None
        state, hashes = _whole(gather, self.ranks.device, "cpu") if self.ranks.rank == 0 else ({}, {})
        gather.rest()
        with self.ranks.together():
            if self.ranks.rank == 0:
                known = self._known_adapter(job, request)
                published = known or self._put_adapter(job, request, state, hashes)
        return published

    def share_adapter(self, request: trainer_pb2.PublishWeightsRequest) -> Published:
        """Keeps the whole adapter on this rank's device, as it is published, for the replica that the rank is. Returns
        when all ranks have it, because rank 0 asks them to take it next."""
        job = self._configured(request.job_id)
        with self.ranks.together():
            self._shared, hashes = _whole(job.engine.gather(evaluated=request.evaluated), self.ranks.device)
        size = sum(tensor.nbytes for tensor in self._shared.values())
        return Published(int(request.version), hashes, size, evaluated=request.evaluated)

    def shared_adapter(self) -> dict[str, Tensor]:
        """Hands over the adapter that `share_adapter` collected last."""
        shared, self._shared = self._shared, {}
        return shared

    def send_weights(self, request: trainer_pb2.PublishWeightsRequest) -> Published | None:
        """Collective. Rank 0 broadcasts all buckets. Raises Unavailable on rank 0 alone when the broadcast fails, the
        ranks in step; any other exception, as of a gather, leaves them out of step."""
        job = self._configured(request.job_id)
        gather = job.engine.gather(evaluated=request.evaluated)
        if self.ranks.rank != 0:
            gather.rest()
            return None

        def fill(bucket: Bucket, flat: Tensor) -> None:
            with self.ranks.beats.phase(Phase.WORK):  # waits for ranks, not for replicas
                gather.fill(bucket, flat)

        assert self.member is not None, "the publisher joins before it sends"
        try:
            sent = weights.send(self.member, gather.buckets, fill, self.ranks.device)
        except TransferError as error:
            gather.rest()  # with the other ranks, to the end
            raise Unavailable(f"the broadcast failed: {error}") from error
        return Published(int(request.version), sent.hashes, sent.bytes, evaluated=request.evaluated)

    def _gradients(self, job: Job, request: trainer_pb2.TrainStepRequest) -> RewardGradients:
        """Returns the gradients of the rewards of a step, computed when they are asked for."""
        if self._client is None:
            self._client = GradientClient(job.spec.timeouts.score_s, self.ranks.beats.beat, self.loop, self.ranks.rank)
        return RewardGradients(
            job.spec,
            job.engine.decoder,
            self._client,
            self.ranks,
            request,
            job.record.history,
            job.checkpoints.directory,
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around an update: waits until this rank samples no more. The others may wait longer, in a collective."""
        with ExitStack() as stack:
            with self.ranks.beats.phase(Phase.LOAD):  # the step at work may compile
                stack.enter_context(self.turns.training())
            yield

    def _batches(self, job: Job, updates: Sequence[Update]) -> list[list[Batch]]:
        """This rank's of each update."""
        part = job.engine.mesh.part(self.ranks.rank)
        return [[job.reader.batch(micro) for micro in update.by_rank[part]] for update in updates]

    def _configured(self, job_id: str) -> Job:
        if self.job is None or job_id != self.job.job_id:
            owner = "no job yet" if self.job is None else f"job {self.job.job_id}"
            raise Conflict(f"this trainer belongs to {owner}: call Configure for job {job_id}, on a trainer of its own")
        return self.job

    def _loaded(self, request: trainer_pb2.ConfigureRequest) -> Job | None:
        """The job; None where the newest checkpoint turned out damaged while it was loaded: the engine goes with it."""
        chosen = None
        with self.ranks.together():
            spec = parse_job(json.loads(request.spec_json))
            self.ranks.beats.timeouts = spec.timeouts
            if "TORCHELASTIC_RUN_ID" in os.environ:  # in a pod; the launcher of one machine keeps the whole output
                copy_to(Path(request.directory).parent / "logs" / f"rank-{self.ranks.rank}.log")
            if self.ranks.rank == 0 and request.inputs:
                self._require_inputs(spec, request.inputs)
            checkpoints = Checkpoints(Path(request.directory), request.job_id, spec.schedule.keep_last)
            if self.ranks.rank == 0:
                checkpoints.take_over()
                chosen = checkpoints.choose(
                    _judge(request), from_start=not request.HasField("ledger") or request.ledger.from_start
                )
        name = self.ranks.broadcast(str(chosen or "").encode()).decode()
        with self.ranks.together():
            engine = Engine(spec, self.ranks, resumes=bool(name))
        self.ranks.connect()
        engine.shard()
        try:
            return self._resumed(request, engine, checkpoints, name)
        except DataLoss:
            return None

    def _require_inputs(self, spec: JobSpec, known: Mapping[str, str]) -> None:
        """Raises DataLoss for a model, adapter or checkpoint that was changed since the job began."""
        with self.ranks.beats.phase(Phase.LOAD):
            if reason := change(known, fingerprints(spec), inputs_of(spec)):
                raise DataLoss(reason)

    def _resumed(
        self, request: trainer_pb2.ConfigureRequest, engine: Engine, checkpoints: Checkpoints, name: str
    ) -> Job:
        with self.ranks.beats.phase(Phase.CHECKPOINT):
            record = checkpoints.load(engine, Path(name)) if name else Record()
            if not name and engine.spec.trainer.resume is not None:
                checkpoints.start_from(engine, Path(engine.spec.trainer.resume))
        log.info("configured at version %d", record.version, extra={"job": request.job_id})
        reader = reader_of(engine.adapter, engine.spec, self._blobs, self.ranks.beats.beat)
        mfu = Mfu(engine.spec, self.ranks, engine.adapter)
        inputs = dict(request.inputs)
        return Job(request.job_id, engine.spec, engine, reader, checkpoints, record, mfu, name, inputs)

    def _passed_over(self, job: Job, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepResponse:
        """A step without samples changes no weight, but counts as applied: versions and steps go together."""
        log.info("no samples to train on", extra=_extra(request))
        job.record.add(request, {"training/step_samples": 0.0, "training/samples_total": float(job.record.samples)})
        return step_response(job.record, request.step, replayed=False)

    def _recorded(
        self,
        job: Job,
        request: trainer_pb2.TrainStepRequest,
        metrics: dict[str, float],
        num_updates: int,
        timings: Timings,
    ) -> None:
        record = job.record
        skipped = int(metrics["actor/skipped_updates"])
        record.skipped_updates += skipped
        record.samples += len(request.samples)
        staleness = [request.step - item.sample.policy_version for item in request.samples]
        metrics |= {
            "actor/skipped_updates_total": float(record.skipped_updates),
            "training/step_samples": float(len(request.samples)),
            "training/samples_total": float(record.samples),
            "training/off_policy/trajectory_staleness/max": float(max(staleness)),
            "perf/update_samples_per_s": len(request.samples) / timings.seconds["update_actor"],
            "perf/peak_memory_gib": devices.peak_memory_bytes(self.ranks.device) / _GIB,
            **timings.metrics(),
        }
        record.add(request, {name: value for name, value in metrics.items() if math.isfinite(value)})
        if skipped:
            log.warning("skipped %d of %d updates: gradient not finite", skipped, num_updates, extra=_extra(request))

    def _known_adapter(self, job: Job, request: trainer_pb2.PublishWeightsRequest) -> Published | None:
        """The version's blob when it is still there, its time to live renewed."""
        for published in job.adapters:
            if published.is_of(request) and published.adapter is not None:
                gone = self._blobs.renew([published.adapter], ADAPTER_TTL_S)
                return None if gone else published
        return None

    def _put_adapter(
        self, job: Job, request: trainer_pb2.PublishWeightsRequest, state: dict[str, Tensor], hashes: dict[str, int]
    ) -> Published:
        data = lora.adapter_to_bytes(state)
        kind, attempt = "evaluated" if request.evaluated else "adapter", job.checkpoints.fence.attempt
        key = keys.blob(job.job_id, kind, request.version, attempt)  # an earlier trainer that wakes has another key
        with self.ranks.beats.phase(Phase.OUTSIDE):
            ref = self._blobs.put(key, data, ttl_s=ADAPTER_TTL_S)
        job.adapters.append(Published(int(request.version), hashes, len(data), ref, request.evaluated))
        for old in job.adapters[:-_ADAPTERS_KEPT]:
            if old.adapter is not None:
                self._blobs.delete([old.adapter])
        job.adapters = job.adapters[-_ADAPTERS_KEPT:]
        return job.adapters[-1]


def _identity(request: trainer_pb2.ConfigureRequest) -> tuple[str, ...]:
    """Returns the fields that a configured job is recognized by. The ledger is not among them, because it changes."""
    return request.job_id, request.spec_json, request.directory


def _judge(request: trainer_pb2.ConfigureRequest) -> Callable[[Record], str]:
    """Says why a record does not go with the ledger; "" where it does."""
    if not request.HasField("ledger"):
        return lambda record: ""
    return lambda record: misfit(record.version, record.history, request.ledger)


def step_response(record: Record, step: int, *, replayed: bool) -> trainer_pb2.TrainStepResponse:
    """Response to an applied step."""
    return trainer_pb2.TrainStepResponse(
        step=step, policy_version=step + 1, metrics=record.result(step), replayed=replayed
    )


def _whole(
    gather: Gather, device: torch.device, to: torch.device | str | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and their hashes, by name; hashed on the device and kept there, or moved."""
    state: dict[str, Tensor] = {}
    hashes = weights.Hashes()
    for bucket in gather.buckets:
        flat = devices.byte_buffer(weights.bucket_bytes(bucket), device)
        gather.fill(bucket, flat)
        hashes.add((spec.name, view) for spec, view in weights.views(bucket, flat))
        state |= {spec.name: view for spec, view in weights.views(bucket, flat.to(to or device))}
    return state, hashes.result()


def _extra(request: trainer_pb2.TrainStepRequest) -> dict[str, object]:
    return {"job": request.job_id, "step": request.step}
