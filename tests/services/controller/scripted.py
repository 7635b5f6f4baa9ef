"""A fleet without models for tests of the control plane: real gRPC servers and a real Redis, whose rollout, trainer and
rewards do what the protocol wants and keep what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from redis.asyncio import Redis

from flowfleet.api.jobs import JobStatus
from flowfleet.data.blobs import BlobStore, open_blobs
from flowfleet.data.replicas import ReplicaDirectory, ReplicaRecord
from flowfleet.data.streams import TrajectoryStream
from flowfleet.errors import DataLoss, FlowfleetError, grpc_code
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.media.files import encode_media
from flowfleet.proto import (
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.jobs.scheduler import JobScheduler
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.settings import ControllerSettings
from services.controller.store.records import JobRecord
from services.controller.store.store import Store
from tests.services.controller.places import Places
from tests.serving import started

Score = Callable[[reward_pb2.RewardSample], float]


class ScriptedRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves whatever version it is given. A sample's media are what was given for it, else noise."""

    def __init__(self, redis: Redis, blobs: BlobStore) -> None:
        self.redis, self.blobs = redis, blobs
        self.job_id, self.version, self.evaluated = "", -1, False
        self.address = ""
        self.refuses = False
        self.drains = False
        self.num_devices = 1
        self.broken = b""
        """Content of files that it cannot read."""
        self.not_finite: set[int] = set()
        """Indices of samples whose latents are NaN."""
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.images: list[list[bytes]] = []

    async def Generate(self, request: Any, context: Any) -> Any:
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the text encoder is missing")
        given = [await self.blobs.get(m.blob) for group in request.groups for m in (*group.images, *group.media)]
        if self.broken and self.broken in given:
            await context.abort(grpc.StatusCode.DATA_LOSS, "not a whole image/png")
        assert (request.job_id, request.policy_version) == (self.job_id, self.version)
        assert request.evaluated == self.evaluated
        self.requests.append(request)
        for group in request.groups:
            self.images.append([await self.blobs.get(image.blob) for image in group.images])
            for place, index in enumerate(group.indices):
                if index in self.not_finite:
                    name = common_pb2.SampleId(job_id=request.job_id, step=request.step, group=group.group, index=index)
                    yield rollout_pb2.GenerateEvent(sample=common_pb2.Sample(id=name), failure="its latents are NaN")
                    continue
                yield rollout_pb2.GenerateEvent(sample=await self._sample(request, group, place, index))

    async def _sample(self, request: Any, group: Any, place: int, index: int) -> common_pb2.Sample:
        if group.media:
            assert await self.blobs.get(group.media[place].blob)
            media = group.media[place]
        else:
            media = await self._draw(request, group, index)
        sample = common_pb2.Sample(
            id=common_pb2.SampleId(job_id=request.job_id, step=request.step, group=group.group, index=index),
            purpose=request.purpose,
            policy_version=request.policy_version,
            seed=group.seeds[place],
            height=request.sampling.height,
            width=request.sampling.width,
            num_frames=request.sampling.num_frames,
            sde_steps=request.noise.recorded_steps,
            media=media.blob,
            media_type=media.media_type,
        )
        if request.purpose == common_pb2.PURPOSE_TRAIN:
            for part in ("trajectory", "prompt_embeds", "negative_embeds"):
                getattr(sample, part).CopyFrom(await self._put(request, part, group, index, b"tensors"))
            await TrajectoryStream(self.redis, request.job_id).publish(sample)
        return sample

    async def _draw(self, request: Any, group: Any, index: int) -> common_pb2.Media:
        """Noise."""
        size = (request.sampling.num_frames, 16, 16, 3)
        frames = np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)
        data, media_type = encode_media(frames)
        return common_pb2.Media(blob=await self._put(request, "media", group, index, data), media_type=media_type)

    async def _put(self, request: Any, kind: str, group: Any, index: int, data: bytes) -> common_pb2.BlobRef:
        purpose = request.purpose
        return await self.blobs.put(keys.blob(request.job_id, kind, purpose, request.step, group.group, index), data)

    async def announce(self) -> None:
        state = "draining" if self.drains else "idle" if self.version < 0 else "serving"
        record = ReplicaRecord("r0", self.address, "i", "", "default", state, self.job_id, max(0, self.version))
        record = replace(record, evaluated=self.evaluated, num_devices=self.num_devices)
        await ReplicaDirectory(self.redis).put(record)

    async def renew(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(1)

    async def GetStatus(self, request: Any, context: Any) -> rollout_pb2.RolloutStatus:
        serving, idle = rollout_pb2.ROLLOUT_STATE_SERVING, rollout_pb2.ROLLOUT_STATE_IDLE
        if self.drains:
            serving = rollout_pb2.ROLLOUT_STATE_DRAINING
        return rollout_pb2.RolloutStatus(
            replica_id="r0",
            incarnation="i",
            state=idle if self.version < 0 else serving,
            job_id=self.job_id,
            policy_version=max(0, self.version),
            evaluated=self.evaluated,
            num_devices=self.num_devices,
        )


class ScriptedTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Applies each step once, those without samples too. Ahead of the ledger, it goes back to it. As a trainer it does
    one thing at a time, and publishes no version but the one that it holds."""

    def __init__(self, rollout: ScriptedRollout) -> None:
        self.rollout = rollout
        self.turn = asyncio.Lock()
        self.refused: list[int] = []
        """Versions that it was asked to publish and did not hold."""
        self.steps: list[trainer_pb2.TrainStepRequest] = []
        self.published: list[tuple[int, bool]] = []
        """Versions, and whether in their evaluated weights."""
        self.metrics: dict[int, dict[str, float]] = {}
        """Metrics by step."""
        self.saves: list[trainer_pb2.SaveCheckpointRequest] = []
        self.exports: list[trainer_pb2.ExportModelRequest] = []
        self.num_ends = 0
        self.reads = False
        """Whether it reads its samples, as a trainer does."""
        self.refuses = ""
        """Why it takes no job."""
        self.ranks: list[trainer_pb2.RankProgress] = []
        """Progress that it tells; only rank 0 gives signs."""

    async def Configure(self, request: Any, context: Any) -> trainer_pb2.ConfigureResponse:
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuses)
        if request.HasField("ledger"):
            del self.steps[request.ledger.latest :]
        return trainer_pb2.ConfigureResponse(applied_steps=len(self.steps), world_size=1)

    async def TrainStep(self, request: Any, context: Any) -> trainer_pb2.TrainStepResponse:
        for sample in (item.sample for item in request.samples if self.reads):
            try:
                for part in ("trajectory", "prompt_embeds", "negative_embeds"):
                    if await self.rollout.blobs.get(getattr(sample, part)) != b"tensors":
                        place = f"{sample.id.job_id}/{sample.id.step}/{sample.id.group}/{sample.id.index}"
                        raise DataLoss(f"sample {place}: not tensors")
            except FlowfleetError as error:
                await context.abort(grpc_code(error), str(error))
        async with self.turn:
            if request.step == len(self.steps):
                self.steps.append(request)
        assert request.step < len(self.steps)
        metrics = self.metrics.get(request.step, {})
        return trainer_pb2.TrainStepResponse(step=request.step, policy_version=request.step + 1, metrics=metrics)

    async def PublishWeights(self, request: Any, context: Any) -> trainer_pb2.PublishWeightsResponse:
        async with self.turn:
            if request.version != len(self.steps):
                self.refused.append(request.version)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"it holds version {len(self.steps)}")
        self.published.append((request.version, request.evaluated))
        self.rollout.job_id, self.rollout.version = request.job_id, request.version
        self.rollout.evaluated = request.evaluated
        await self.rollout.announce()
        results = [trainer_pb2.PublishResult(replica_id=replica.replica_id, ok=True) for replica in request.replicas]
        return trainer_pb2.PublishWeightsResponse(version=request.version, results=results)

    async def SaveCheckpoint(self, request: Any, context: Any) -> trainer_pb2.SaveCheckpointResponse:
        self.saves.append(request)
        return trainer_pb2.SaveCheckpointResponse(applied_steps=len(self.steps), path="checkpoint")

    async def ExportModel(self, request: Any, context: Any) -> trainer_pb2.ExportModelResponse:
        self.exports.append(request)
        return trainer_pb2.ExportModelResponse(path="model")

    async def End(self, request: Any, context: Any) -> trainer_pb2.EndTrainerResponse:
        self.num_ends += 1
        return trainer_pb2.EndTrainerResponse()

    async def GetStatus(self, request: Any, context: Any) -> trainer_pb2.TrainerStatus:
        for first in self.ranks[:1]:
            first.signs += 1
        return trainer_pb2.TrainerStatus(state=trainer_pb2.TRAINER_STATE_READY, ranks=self.ranks)


class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    """Scores by a function; keeps the sizes of its calls."""

    def __init__(self, score: Score, **described: Any) -> None:
        self.score, self.described = score, described
        self.fails_after: int | None = None
        """Calls that go well; None: all."""
        self.sizes: list[int] = []
        self.failed = 0
        """Calls that did not."""
        self.version, self.refuses = "", ""
        """Version of its answers; error of each sample."""

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse(**self.described)

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        if self.fails_after is not None and len(self.sizes) >= self.fails_after:
            self.failed += 1
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
        self.sizes.append(len(request.samples))
        if self.refuses:
            scores = [reward_pb2.RewardScore(sample_id=s.sample_id, error=self.refuses) for s in request.samples]
        else:
            scores = [reward_pb2.RewardScore(sample_id=s.sample_id, score=self.score(s)) for s in request.samples]
        return reward_pb2.ScoreResponse(scores=scores, version=self.version)


class ScriptedLauncher(Places):
    """The one trainer, for every job."""

    def __init__(self, address: str, places: int = 1) -> None:
        super().__init__(places)
        self.address = address

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        return self.address

    async def alive(self, job_id: str) -> bool:
        return True

    def placed(self, job_id: str) -> bool:
        return True

    async def termination_message(self, job_id: str) -> str:
        return ""

    async def ended(self, job_id: str) -> None:
        return

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        return

    async def keep_only(self, job_ids: Collection[str]) -> None:
        return


@dataclass
class ScriptedFleet:
    rollout: ScriptedRollout
    trainer: ScriptedTrainer
    rewards: dict[str, ScriptedReward]
    store: Store
    runner: JobScheduler
    blobs: BlobStore
    redis: Any
    make_runner: Callable[..., JobScheduler]

    async def restart(self, meanwhile: Callable[[], object] = lambda: None, **settings: Any) -> None:
        """Continues with another scheduler, which knows what Redis holds and nothing else; `settings` are its own."""
        await self.runner.stop()
        meanwhile()
        self.runner = self.make_runner(**settings)
        await self.runner.start()

    async def run(self, job: dict[str, Any]) -> JobRecord:
        """A job to its good end."""
        return await self.succeeded((await self.submit(job)).id)

    async def succeeded(self, job_id: str) -> JobRecord:
        record = await self.ended(job_id)
        assert record.status is JobStatus.SUCCEEDED, record.reason
        return record

    async def ended(self, job_id: str) -> JobRecord:
        return await self.reached(job_id, lambda record: record.status.terminal)

    async def submit(self, job: dict[str, Any]) -> JobRecord:
        record, _ = await self.store.jobs.create(parse_job(job))
        await self.runner.notify()
        return record

    async def reached(self, job_id: str, condition: Callable[[JobRecord], bool]) -> JobRecord:
        while not condition(record := await self.store.jobs.get(job_id)):
            assert record.status is not JobStatus.FAILED, record.reason
            await asyncio.sleep(0.02)
        return record

    async def blob_keys(self, job_id: str, kind: str) -> list[bytes]:
        return [key async for key in self.redis.scan_iter(match=keys.blob(job_id, kind) + ":*")]


@asynccontextmanager
async def scripted_fleet(
    redis_url: str, state_dir: Path, rewards: Mapping[str, ScriptedReward], *, places: int = 1, **settings_of: Any
) -> AsyncIterator[ScriptedFleet]:
    redis = connect(redis_url)
    blobs = open_blobs(redis, "redis")
    rollout = ScriptedRollout(redis, blobs)  # the trainer gives it its versions
    trainer = ScriptedTrainer(rollout)
    servers: list[grpc.aio.Server] = []

    async def serve(service: Any) -> str:
        server, address = await started(service)
        servers.append(server)
        return address

    rollout.address = await serve(rollout)
    renewing = asyncio.create_task(rollout.renew())
    addresses = {name: await serve(reward) for name, reward in rewards.items()}
    launcher = ScriptedLauncher(await serve(trainer), places)
    settings = ControllerSettings(
        redis_url=SecretStr(redis_url),
        state_dir=state_dir,
        data_roots=(state_dir.parent,),
        rewards=addresses,
        **settings_of,
    )
    store = Store(redis)

    def make_runner(**changed: Any) -> JobScheduler:
        directory = StaticDirectory(settings.rewards, settings.rewards_file)
        return JobScheduler(settings.model_copy(update=changed), redis, store, CollectorRegistry(), launcher, directory)

    fleet = ScriptedFleet(rollout, trainer, dict(rewards), store, make_runner(), blobs, redis, make_runner)
    await fleet.runner.start()
    try:
        async with asyncio.timeout(300):
            yield fleet
    finally:
        renewing.cancel()
        await fleet.runner.stop()
        await asyncio.gather(*(server.stop(None) for server in servers))
        await redis.aclose()
