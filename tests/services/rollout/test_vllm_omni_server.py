"""A replica with vLLM-Omni in it, as a process: real gRPC, real Redis, adapters and full weights."""

import asyncio
from pathlib import Path

import torch
from google.protobuf.message import Message

from flowfleet.data.trajectories import Trajectory
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.weights import weights
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.sampling.requests import generation_request
from tests.services.rollout.conftest import LORA
from tests.services.rollout.replica import Client, ReplicaProcess, Sender, make_generate, make_weights

SERVING = rollout_pb2.ROLLOUT_STATE_SERVING


async def test_a_replica_serves_adapters_and_full_weights(tmp_path: Path, model: ModelSpec, redis_url: str) -> None:
    flags = ("--engine", "vllm-omni", "--model", model.path, "--dtype", model.dtype, "--max-batch", "8")
    replica = ReplicaProcess(tmp_path / "replica", redis_url, *flags, "--metrics-port", "0")
    expected = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    async with Client(replica.address, redis_url) as client:
        state = await client.publish_adapter("job-a", 0, model, LORA, seed=1)
        status = await client.status()
        assert (status.engine, status.device, status.state) == ("vllm-omni", "cpu", SERVING)
        assert status.weights_digest == weights.digest(weights.tensor_hashes(state.items()))
        await expected.prepare(model, LORA)
        await expected.load_adapter(state)
        await check(client, "job-a", expected)

        trained = make_weights(model, 0.01)
        await publish_full(client, "job-b", model, trained)
        await expected.prepare(model, None)
        for name, parameter in weights.full_parameters(loaded(expected)).items():
            parameter.data.copy_(trained[name])
        await check(client, "job-b", expected)
    await expected.close()
    replica.terminate()
    assert replica.wait() == 0, replica.log.read_text()


def loaded(engine: DiffusersEngine) -> dict[str, torch.nn.Module]:
    assert engine._adapter is not None
    return engine._adapter.experts


async def check(client: Client, job_id: str, expected: DiffusersEngine) -> None:
    """What the replica stored is what the diffusers engine draws with the same weights."""
    samples: list[common_pb2.Sample] = await client.generate(make_generate(job_id, 0))
    again = await client.generate(make_generate(job_id, 0))
    assert [serialized(sample) for sample in again] == [serialized(sample) for sample in samples]
    request = generation_request(make_generate(job_id, 0))
    (batch,) = [batch async for batch in expected.generate(request, lambda: False)]
    assert len(samples) == 6
    for sample, wanted in zip(samples, batch.samples, strict=True):
        assert isinstance(wanted.record, Trajectory)
        stored = Trajectory.from_bytes(await client.blobs.get(sample.trajectory))
        torch.testing.assert_close(stored.next_latents, wanted.record.next_latents, atol=1e-4, rtol=0)
        torch.testing.assert_close(stored.log_probs, wanted.record.log_probs, atol=1e-4, rtol=0)


async def publish_full(client: Client, job_id: str, model: ModelSpec, trained: dict[str, torch.Tensor]) -> None:
    sender = Sender("group-1", 30.0)
    buckets = weights.make_buckets(weights.specs_of(trained), bucket_bytes=100_000)
    broadcast = rollout_pb2.Broadcast(group_id="group-1", buckets=buckets)
    update = rollout_pb2.UpdateWeightsRequest(job_id=job_id, version=0, broadcast=broadcast)
    await client.init(job_id, model)
    await asyncio.gather(sender.join(), client.init(job_id, model, group=sender.replica_group()))
    await client.start(job_id, 0)
    await asyncio.gather(sender.send(buckets, trained), client.call("UpdateWeights", update))
    await client.finish(job_id, 0, weights.tensor_hashes(trained.items()))
    assert sender.member is not None
    sender.member.close()


def serialized(message: Message) -> bytes:
    return message.SerializeToString()
