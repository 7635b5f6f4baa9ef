"""A trainer process that is a replica as well: found in the fleet, published to in process, and it makes a drawer's
bits for its own training steps."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.replicas import ReplicaDirectory, ReplicaRecord
from flowfleet.job.spec import JobSpec
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc, trainer_pb2
from flowfleet.redis import client as redis_client
from flowfleet.redis import keys
from flowfleet.seeds import sample_seed
from tests.services.trainer.processes import CALL_TIMEOUT_S, Launch, Trainer
from tests.services.trainer.steps import JOB, PROMPTS, Drawer, make_spec
from tests.streamed import streamed

pytestmark = pytest.mark.long


def replicas(redis_url: str) -> list[ReplicaRecord]:
    async def look() -> list[ReplicaRecord]:
        async with redis_client.connect(redis_url) as client:
            return list((await ReplicaDirectory(client).look()).changed)

    return asyncio.run(look())


def publish(trainer: Trainer, version: int, replica: ReplicaRecord) -> trainer_pb2.PublishWeightsResponse:
    request = trainer_pb2.PublishWeightsRequest(job_id=JOB, version=version)
    request.replicas.add(replica_id=replica.replica_id, address=replica.address)
    response: trainer_pb2.PublishWeightsResponse = trainer.stub.PublishWeights(request, timeout=CALL_TIMEOUT_S)
    assert [result.error for result in response.results] == [""]
    return response


def generate(
    redis_url: str, spec: JobSpec, replica: ReplicaRecord, step: int, groups: Sequence[int]
) -> list[common_pb2.Sample]:
    """What the controller asks for, in the batches that a `Drawer` has."""
    rollout = spec.rollout
    request = rollout_pb2.GenerateRequest(
        job_id=JOB,
        step=step,
        policy_version=step,
        purpose=common_pb2.PURPOSE_TRAIN,
        record=common_pb2.RECORD_STEPS,
        sampling=rollout_pb2.Sampling(height=32, width=32, num_inference_steps=4, guidance_scale=1.0),
        noise=rollout_pb2.Noise(
            step_type=rollout.noise.type, eta=rollout.noise.eta, sde_steps=rollout.noise_window.noisy(spec.seed, step)
        ),
        groups=[
            rollout_pb2.PromptGroup(
                group=group,
                prompt=PROMPTS[group],
                indices=range(rollout.group_size),
                seeds=[sample_seed(spec.seed, step, group, index) for index in range(rollout.group_size)],
            )
            for group in groups
        ],
    )
    stub: Any = rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(replica.address))
    told = [event.sample for event in stub.Generate(request, timeout=CALL_TIMEOUT_S)]
    with redis_client.connect_sync(redis_url) as client:
        return streamed(told, client.xrange(keys.trajectories(JOB)))


def draw(redis_url: str, spec: JobSpec, replica: ReplicaRecord, step: int) -> trainer_pb2.TrainStepRequest:
    """Draws by the replica what `Drawer.draw` draws."""
    samples = [sample for groups in ([0, 1], [2]) for sample in generate(redis_url, spec, replica, step, groups)]
    request = trainer_pb2.TrainStepRequest(job_id=JOB, step=step)
    for number, sample in enumerate(sorted(samples, key=lambda s: (s.id.group, s.id.index))):
        advantage = (1.0 if number % 2 else -1.0) * (1 + sample.id.group / 2)
        request.samples.add(sample=sample, advantage=advantage, reward=0.5)
    return request


def hashes(request: trainer_pb2.TrainStepRequest) -> list[str]:
    return [item.sample.trajectory.sha256 for item in request.samples]


def test_a_rank_samples_what_it_trains_on(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, redis_url: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    spec = make_spec(tiny_qwen_image, trainer={"samples": "only"})
    trainer: Trainer = launch(Trainer, spec, tmp_path)
    trainer.configure()
    (replica,) = replicas(redis_url)
    assert (replica.pool, replica.state, replica.replica_id) == ("default.trainer", "idle", f"{JOB}.rank0")

    digest = publish(trainer, 0, replica).weights_digest
    assert replicas(redis_url)[0].digest == digest
    client = redis_client.connect_sync(redis_url)
    assert not list(client.scan_iter(match=keys.blob(JOB, "adapter") + "*")), "nothing is published by a blob"
    assert hashes(draw(redis_url, spec, replica, 0)) == hashes(Drawer(spec).draw(blobs, 0))
    for step in range(2):
        request = draw(redis_url, spec, replica, step)
        done = trainer.train(request)
        assert done.metrics["rollout_corr/exact"] == 1.0
        with pytest.raises(grpc.RpcError, match=f"serves version {step} of job {JOB}, not version {step + 1}"):
            draw(redis_url, spec, replica, step + 1)  # the update was not published yet
        digest = publish(trainer, step + 1, replica).weights_digest
    expected = hashes(draw(redis_url, spec, replica, 2))
    trainer.save()
    trainer.kill()

    resumed: Trainer = launch(Trainer, spec, tmp_path, name="resumed")
    assert resumed.configure().applied_steps == 2
    (again,) = replicas(redis_url)
    assert again.incarnation != replica.incarnation
    with pytest.raises(grpc.RpcError, match="has no verified weights"):
        draw(redis_url, spec, again, 2)
    assert publish(resumed, 2, again).weights_digest == digest
    assert hashes(draw(redis_url, spec, again, 2)) == expected
    assert resumed.end() == 0
    assert replicas(redis_url) == []
