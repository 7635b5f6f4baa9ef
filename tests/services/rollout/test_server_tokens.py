"""A replica with the transformers engine as a process: full weights by broadcast, then samples of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
import torch

from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import Tokens
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.weights import weights
from services.rollout.sampling.requests import generation_request
from tests.services.rollout.replica import Client, ReplicaProcess, Sender
from tests.tiny_models.text import save_text_model

SAMPLING = rollout_pb2.SequenceSampling(max_tokens=10, temperature=0.9, top_p=1.0, routed_experts=True)


def asking(job_id: str, version: int, **changes: object) -> rollout_pb2.GenerateRequest:
    sequence = rollout_pb2.SequenceSampling()
    sequence.CopyFrom(SAMPLING)
    for name, value in changes.items():
        setattr(sequence, name, value)
    return rollout_pb2.GenerateRequest(
        job_id=job_id,
        step=3,
        purpose=common_pb2.PURPOSE_TRAIN,
        record=common_pb2.RECORD_TOKENS,
        policy_version=version,
        sampling=rollout_pb2.Sampling(sequence=sequence),
        groups=[rollout_pb2.PromptGroup(group=2, prompt="1+1=", indices=[0, 1, 2], seeds=[5, 6, 7])],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(path=str(save_text_model(tmp_path_factory.mktemp("text"), "experts")), dtype="float32")


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, redis_of_module: str) -> Iterator[ReplicaProcess]:
    flags = ("--replica-id", "t0", "--engine", "transformers", "--max-batch", "8")
    process = ReplicaProcess(tmp_path_factory.mktemp("replica"), redis_of_module, *flags)
    yield process
    process.terminate()
    assert process.wait() == 0, process.log.read_text()


@pytest.mark.long
async def test_tokens_are_those_of_the_weights_that_were_sent(
    replica: ReplicaProcess, model: ModelSpec, redis_of_module: str
) -> None:
    adapter = sequence_adapter_for(model.path).load(model.path, dtype=torch.float32)
    for value in adapter.transformer.parameters():
        value.data.add_(0.01)
    tensors = weights.full_parameters(adapter.experts)
    buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=20_000)
    async with Client(replica.address, redis_of_module) as c:
        sender = Sender("text", 30.0)
        await asyncio.gather(sender.join(), c.init("job-t", model, group=sender.replica_group()))
        await c.start("job-t", 0)
        broadcast = rollout_pb2.Broadcast(group_id="text", buckets=buckets)
        request = rollout_pb2.UpdateWeightsRequest(job_id="job-t", version=0, broadcast=broadcast)
        await asyncio.gather(sender.send(buckets, tensors), c.call("UpdateWeights", request))
        await c.finish("job-t", 0, weights.tensor_hashes(tensors.items()))
        status = await c.status()
        assert (status.engine, status.weights_digest) == (
            "transformers",
            weights.digest(weights.tensor_hashes(tensors.items())),
        )
        samples = await c.generate(asking("job-t", 0))
        assert [(one.id.group, one.id.index, one.seed) for one in samples] == [(2, 0, 5), (2, 1, 6), (2, 2, 7)]
        assert len({one.prompt_embeds.uri for one in samples}) == 1
        for sample in samples:
            prompt = PromptBlob.from_bytes(await c.blobs.get(sample.prompt_embeds)).encoded()
            record = TokenTrajectory.from_bytes(await c.blobs.get(sample.trajectory))
            written = [Tokens(prompt, record.token_ids, record.routed_experts)]
            with torch.no_grad():
                assert torch.equal(adapter.log_probs(written, temperature=0.9), record.log_probs)
            assert sample.media_type == "text/plain"
            assert (await c.blobs.get(sample.media)).decode() == adapter.text(record.token_ids)
            counts = (sample.prompt_tokens, sample.num_tokens, sample.stop_reason, sample.height, sample.num_frames)
            assert counts == (4, len(record.token_ids), record.stop_reason, 0, 0)
        assert await c.generate(asking("job-t", 0)) == samples
        code, message = await c.refusal(c.generate(asking("job-t", 0, max_prompt_tokens=3)))
        assert (code, "max_prompt_tokens = 3" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_a_request_of_tokens_arrives_as_it_was_meant() -> None:
    sent = asking("job", 0, top_p=0.5, max_prompt_tokens=9)
    sent.sampling.sequence.stop.append("#")
    request = generation_request(rollout_pb2.GenerateRequest.FromString(sent.SerializeToString()))
    found = request.sequence
    assert found is not None
    assert (found.max_tokens, found.temperature, found.top_p, found.stop) == (10, 0.9, 0.5, ("#",))
    assert (found.max_prompt_tokens, found.routed_experts, request.record) == (9, True, "tokens")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 0}, "max_tokens = 0: give 1 to"),
        ({"temperature": 0.0}, "training samples need one above 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, r"top_p = 0\.0: give a number above 0"),
    ],
)
def test_settings_of_tokens_that_cannot_work_are_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generation_request(asking("job", 0, **changes))


def test_training_samples_of_tokens_need_their_record() -> None:
    request = asking("job", 0)
    request.record = common_pb2.RECORD_STEPS
    with pytest.raises(ValueError, match="need RECORD_TOKENS"):
        generation_request(request)
