"""A replica as a process: real gRPC, real Redis, real weights, with the test as trainer and controller."""

import asyncio
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from flowfleet.data.replicas import ReplicaDirectory
from flowfleet.data.streams import TrajectoryConsumer
from flowfleet.data.trajectories import EmbedsBlob, Trajectory
from flowfleet.limits import MAX_PROMPT_BYTES
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.redis import keys
from flowfleet.weights import weights
from services.rollout.__main__ import parser
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.process import serve
from services.rollout.sampling.requests import generation_request
from tests.services.rollout.conftest import LORA
from tests.services.rollout.replica import Client, ReplicaProcess, Sender, make_adapter, make_generate, make_weights

Code = grpc.StatusCode
IDLE, SERVING = rollout_pb2.ROLLOUT_STATE_IDLE, rollout_pb2.ROLLOUT_STATE_SERVING


@pytest.fixture(scope="module")
def replica(
    tmp_path_factory: pytest.TempPathFactory, model: ModelSpec, redis_of_module: str
) -> Iterator[ReplicaProcess]:
    """One replica for the whole file; a test binds it to a job of its own."""
    flags = (
        "--replica-id",
        "r0",
        "--model",
        model.path,
        "--dtype",
        model.dtype,
        "--max-batch",
        "8",
        "--metrics-port",
        "0",
    )
    process = ReplicaProcess(tmp_path_factory.mktemp("replica"), redis_of_module, *flags)
    yield process
    process.terminate()
    assert process.wait() == 0, process.log.read_text()


@pytest.fixture
def client(replica: ReplicaProcess, redis_of_module: str) -> Any:
    """A maker of connections: clients belong to a test's own event loop."""
    return lambda: Client(replica.address, redis_of_module)


def long_generate(job_id: str, version: int, num_steps: int) -> rollout_pb2.GenerateRequest:
    """Work of many denoising steps."""
    sampling = rollout_pb2.Sampling(height=64, width=64, num_inference_steps=num_steps, guidance_scale=1.0)
    return make_generate(job_id, version, sampling=sampling)


async def steps_of_a_second(c: Client, job_id: str) -> int:
    """Number of steps that last over a second on this machine, whatever its speed: measured by a call of 100."""
    started = time.monotonic()
    await c.generate(long_generate(job_id, 0, 100))
    return min(1000, max(100, int(150 / (time.monotonic() - started))))


async def test_a_fresh_replica_is_registered_healthy_and_takes_no_prompt(client: Any) -> None:
    async with client() as c:
        record = await ReplicaDirectory(c.redis).get("r0")
        assert record is not None
        assert (record.address, record.state, record.device) == (c.address, "idle", "cpu")
        status = await c.status()
        assert (status.state, status.job_id, status.in_flight) == (IDLE, "", 0)
        assert status.incarnation == record.incarnation
        assert (status.engine, status.device, status.device_id) == ("diffusers", "cpu", "")
        health = await health_pb2_grpc.HealthStub(c.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        code, message = await c.refusal(c.generate(make_generate("job-a", 0)))
        assert (code, "no verified weights" in message) == (Code.FAILED_PRECONDITION, True)
        code, message = await c.refusal(c.start("job-a", 0))
        assert (code, "InitWeightTransfer" in message) == (Code.FAILED_PRECONDITION, True)


async def test_samples_are_in_the_stream_and_their_blobs_hold_what_they_say(client: Any, model: ModelSpec) -> None:
    samples: list[common_pb2.Sample] = []
    async with client() as c:
        state = await c.publish_adapter("job-a", 0, model, LORA, seed=1)
        status = await c.status()
        assert (status.state, status.job_id, status.policy_version) == (SERVING, "job-a", 0)
        assert status.weights_digest == weights.digest(weights.tensor_hashes(state.items()))
        before = status.samples_total
        samples.extend(await c.generate(make_generate("job-a", 0)))
        assert (await c.status()).samples_total == before + 6
        await check_samples(c, samples)
        consumer = TrajectoryConsumer(c.redis, "job-a", consumer="test")
        streamed = {d.sample.SerializeToString() for d in await consumer.read(100, 1000)}
        assert streamed == {sample.SerializeToString() for sample in samples}
        await check_against_engine(c, samples, state, model)
        two = await asyncio.gather(*(c.generate(make_generate("job-a", 0)) for _ in range(2)))  # In flight at once.
        for again in two:
            assert [sample.SerializeToString() for sample in again] == [s.SerializeToString() for s in samples]
        for sample, measured in zip(
            samples, await c.generate(make_generate("job-a", 0, reference_kl=True)), strict=True
        ):
            assert sample.reference_kl == 0 < measured.reference_kl
            measured.ClearField("reference_kl")
            assert measured == sample
    assert [(s.id.group, s.id.index) for s in samples] == [(group, index) for group in (0, 1) for index in (0, 1, 2)]


async def check_samples(c: Client, samples: list[common_pb2.Sample]) -> None:
    assert len({sample.media.uri for sample in samples}) == 6
    assert len({sample.prompt_embeds.uri for sample in samples}) == 2
    for sample in samples:
        assert (sample.id.job_id, sample.id.step, sample.seed) == (
            "job-a",
            7,
            1000 * sample.id.group + sample.id.index,
        )
        assert (sample.policy_version, sample.replica_id, list(sample.sde_steps)) == (0, "r0", [1, 2])
        assert not sample.HasField("negative_embeds")
        trajectory = Trajectory.from_bytes(await c.blobs.get(sample.trajectory))
        assert trajectory.step_indices.tolist() == [1, 2]
        assert trajectory.latents.shape == (2, 6, 64)
        EmbedsBlob.from_bytes(await c.blobs.get(sample.prompt_embeds))
        image = Image.open(io.BytesIO(await c.blobs.get(sample.media)))
        assert (image.size, image.format, sample.media_type) == ((48, 32), "PNG", "image/png")
        assert 0 < await c.redis.ttl(sample.media.uri.removeprefix("redis:")) <= 24 * 3600


async def check_against_engine(
    c: Client, samples: list[common_pb2.Sample], state: dict[str, torch.Tensor], model: ModelSpec
) -> None:
    """The process made what an engine here makes with the same adapter."""
    engine = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    await engine.prepare(model, LORA)
    await engine.load_adapter(state)
    request = generation_request(make_generate("job-a", 0))
    (batch,) = [batch async for batch in engine.generate(request, lambda: False)]
    await engine.close()
    for sample, expected in zip(samples, batch.samples, strict=True):
        image = np.asarray(Image.open(io.BytesIO(await c.blobs.get(sample.media))))
        assert np.array_equal(image[None], expected.frames)
        assert expected.record is not None
        assert await c.blobs.get(sample.trajectory) == expected.record.to_bytes()


async def test_only_the_served_version_of_the_job_is_sampled(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-b", 3, model, LORA, seed=1)
        for job_id, version in (("job-b", 2), ("job-b", 4), ("job-a", 3)):
            code, message = await c.refusal(c.generate(make_generate(job_id, version)))
            assert code is Code.FAILED_PRECONDITION
            assert "serves version 3 of job job-b" in message
        code, message = await c.refusal(c.generate(make_generate("job-b", 3, evaluated=True)))
        assert code is Code.FAILED_PRECONDITION
        assert "not version 3, evaluated weights, of job job-b" in message
        await c.publish_adapter("job-b", 4, model, LORA, seed=2)
        samples = await c.generate(make_generate("job-b", 4))
        assert {sample.policy_version for sample in samples} == {4}


async def test_validation_has_no_trajectory_and_stays_out_of_the_stream(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-v", 0, model, LORA, seed=1)
        sampling = rollout_pb2.Sampling(
            height=32, width=48, num_inference_steps=3, guidance_scale=4.0, negative_prompt=" "
        )
        request = make_generate(
            "job-v", 0, purpose=common_pb2.PURPOSE_VALIDATE, sampling=sampling, noise=rollout_pb2.Noise()
        )
        samples = await c.generate(request)
        assert len(samples) == 6
        assert not any(sample.HasField("trajectory") for sample in samples)
        assert not any(sample.HasField("prompt_embeds") or sample.HasField("negative_embeds") for sample in samples)
        assert not await c.redis.exists(keys.trajectories("job-v"))


async def test_groups_with_the_same_negative_prompt_share_its_embeddings(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-v", 0, model, LORA, seed=1)
        sampling = rollout_pb2.Sampling(
            height=32, width=48, num_inference_steps=3, guidance_scale=4.0, negative_prompt=" "
        )
        request = make_generate("job-v", 0, sampling=sampling)
        samples = await c.generate(request)
        assert len({sample.negative_embeds.uri for sample in samples}) == 1
        EmbedsBlob.from_bytes(await c.blobs.get(samples[0].negative_embeds))
        shared, first = samples[0].negative_embeds, request.groups[0]
        first.negative_prompt = "a blurred photograph"
        own = {sample.id.group: sample.negative_embeds for sample in await c.generate(request)}
        its_place = c.blobs.uri(keys.blob("job-v", "negative", request.step, first.group))
        assert own.pop(first.group).uri.startswith(its_place + ":")
        assert {ref.uri.rpartition(":")[0] for ref in own.values()} == {shared.uri.rpartition(":")[0]}


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"job_id": "a b"}, "job_id"),
    ({"purpose": common_pb2.PURPOSE_UNSPECIFIED}, "purpose"),
    ({"noise": rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[4])}, "noise.sde_steps"),
    ({"noise": rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[2, 1])}, "noise.sde_steps"),
    ({"noise": rollout_pb2.Noise(step_type="what", eta=0.7, sde_steps=[1])}, "noise.step_type"),
    ({"noise": rollout_pb2.Noise(step_type="sde", eta=float("nan"), sde_steps=[1])}, "noise.eta"),
    ({"noise": rollout_pb2.Noise(step_type="sde", eta=0.0, sde_steps=[1])}, "noise"),
    ({"sampling": rollout_pb2.Sampling(height=0, width=32, num_inference_steps=2)}, "sampling.height"),
    ({"sampling": rollout_pb2.Sampling(height=32, width=10**6, num_inference_steps=2)}, "sampling.width"),
    ({"sampling": rollout_pb2.Sampling(height=32, width=32)}, "num_inference_steps"),
    ({"sampling": rollout_pb2.Sampling(height=32, width=32, num_inference_steps=4)}, "guidance_scale"),
    (
        {"sampling": rollout_pb2.Sampling(height=40, width=32, num_inference_steps=4, guidance_scale=1.0)},
        "multiples of 16",
    ),
]


async def test_bad_requests_say_what_to_change(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-c", 0, model, LORA, seed=1)
        for changes, named in BAD_REQUESTS:
            code, message = await c.refusal(c.generate(make_generate("job-c", 0, **changes)))
            assert (code, named in message) == (Code.INVALID_ARGUMENT, True), message
        twice = make_generate("job-c", 0)
        twice.groups.append(twice.groups[0])
        uneven = make_generate("job-c", 0)
        uneven.groups[0].seeds.append(1)
        for request in (twice, uneven, rollout_pb2.GenerateRequest(job_id="job-c")):
            code, message = await c.refusal(c.generate(request))
            assert (code, "group" in message) == (Code.INVALID_ARGUMENT, True), message
        status = await c.status()
        assert (status.state, status.in_flight) == (SERVING, 0)
        assert len(await c.generate(make_generate("job-c", 0))) == 6


async def test_weights_that_do_not_verify_are_never_served(client: Any, model: ModelSpec) -> None:
    async def assert_refuses_prompts(c: Client) -> None:
        status = await c.status()
        assert (status.state, status.weights_digest) == (IDLE, "")
        code, _ = await c.refusal(c.generate(make_generate("job-d", 0)))
        assert code is Code.FAILED_PRECONDITION

    async with client() as c:
        state = await c.publish_adapter("job-d", 0, model, LORA, seed=1)
        hashes = weights.tensor_hashes(state.items())

        await c.start("job-d", 1)  # A blob with one bit turned.
        ref = await c.put_adapter("job-d", make_adapter(model, LORA, seed=2))
        data = bytearray(await c.blobs.get(ref))
        data[-1] ^= 1
        await c.redis.set(ref.uri.removeprefix("redis:"), bytes(data))
        code, message = await c.refusal(c.update_adapter("job-d", 1, ref))
        assert (code, "SHA-256" in message) == (Code.DATA_LOSS, True)
        await assert_refuses_prompts(c)

        await c.start("job-d", 1)  # Another adapter than the hashes are of.
        await c.update_adapter("job-d", 1, await c.put_adapter("job-d", make_adapter(model, LORA, seed=2)))
        code, message = await c.refusal(c.finish("job-d", 1, hashes))
        assert (code, "do not match" in message) == (Code.DATA_LOSS, True)
        await assert_refuses_prompts(c)

        await c.start("job-d", 1)  # Nothing loaded.
        code, message = await c.refusal(c.finish("job-d", 1, hashes))
        assert (code, "UpdateWeights" in message) == (Code.FAILED_PRECONDITION, True)
        code, message = await c.refusal(c.update_adapter("job-d", 2, ref))
        assert (code, "StartWeightUpdate" in message) == (Code.FAILED_PRECONDITION, True)

        again = await c.publish_adapter("job-d", 1, model, LORA, seed=2)  # A whole update repairs it.
        await c.finish("job-d", 1, weights.tensor_hashes(again.items()))  # The answer was lost; said again.
        assert len(await c.generate(make_generate("job-d", 1))) == 6


def group(**changed: Any) -> rollout_pb2.TransferGroup:
    """One that a replica could join, but for what is changed."""
    fields = {
        "group_id": "g",
        "backend": "gloo",
        "store_host": "127.0.0.1",
        "store_port": 1,
        "rank": 1,
        "world_size": 2,
        "timeout_s": 5.0,
    }
    return rollout_pb2.TransferGroup(**{**fields, **changed})


async def test_an_init_that_cannot_work_leaves_what_is_served(client: Any, model: ModelSpec) -> None:
    """Each request is of another job, so that it would let go of the adapter that is served."""
    models = (
        ModelSpec(path=model.path + "-gone", dtype="float32"),
        ModelSpec(path=model.path, dtype="float31"),
        ModelSpec(dtype="float32"),
        ModelSpec(path="/proc/self", dtype="float32"),
        ModelSpec(path="nul\0", dtype="float32"),
        ModelSpec(path=model.path, dtype="float32", load_format="pickle"),
        ModelSpec(path=model.path, dtype="float32", quantization="int1"),
    )
    loras = (
        LoraSpec(rank=0, alpha=8.0, target_modules=["to_q"]),
        LoraSpec(rank=2**31, alpha=8.0, target_modules=["to_q"]),
        LoraSpec(rank=4, alpha=float("nan"), target_modules=["to_q"]),
        LoraSpec(rank=4, alpha=float("inf"), target_modules=["to_q"]),
        LoraSpec(rank=4, alpha=8.0),
        LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", ""]),
    )
    groups = [
        group(**changed)
        for changed in (
            {"group_id": ""},
            {"group_id": "g" * 257},
            {"group_id": "a b"},
            {"backend": ""},
            {"backend": "mpi"},
            {"backend": "nccl"},  # the replica is on a CPU
            {"store_host": ""},
            {"store_host": "unix:/tmp/store"},
            {"store_host": "host/path"},
            {"store_host": "a,b"},
            {"store_port": 0},
            {"store_port": 65_536},
            {"rank": 0},
            {"rank": 2},
            {"world_size": 1},
            {"world_size": 2**31},
            {"timeout_s": 0.0},
            {"timeout_s": float("nan")},
            {"timeout_s": float("inf")},
            {"timeout_s": 1e9},
        )
    ]
    async with client() as c:
        await c.publish_adapter("job-i", 0, model, LORA, seed=1)
        before = await c.status()
        wrong = [
            *(c.init("job-j", one) for one in models),
            *(c.init("job-j", model, lora=one) for one in loras),
            *(c.init("job-j", model, lora=LORA, group=one) for one in groups),
            *(c.init(job, model, lora=LORA) for job in ("", "../job", "a" * 129, "a:b")),
        ]
        for call in wrong:
            code, message = await c.refusal(call)
            assert code is Code.INVALID_ARGUMENT, message
        assert await c.status() == before
        assert len(await c.generate(make_generate("job-i", 0))) == 6


async def test_a_binding_that_failed_leaves_no_job(client: Any, model: ModelSpec, tmp_path: Path) -> None:
    """The missing weights are noticed only while the folder is loaded."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    async with client() as c:
        await c.publish_adapter("job-i", 0, model, LORA, seed=1)
        await c.refusal(c.init("job-j", ModelSpec(path=str(tmp_path), dtype="float32")))
        assert ((await c.status()).state, (await c.status()).job_id) == (IDLE, "")
        code, _ = await c.refusal(c.start("job-i", 1))
        assert code is Code.FAILED_PRECONDITION
        await c.publish_adapter("job-i", 1, model, LORA, seed=1)


async def test_what_no_submit_would_send_is_refused_in_a_word(
    client: Any, model: ModelSpec, replica: ReplicaProcess
) -> None:
    """Texts and sizes over the limits, and bytes that are no message: nothing of it is in the log at length."""
    async with client() as c:
        await c.publish_adapter("job-l", 0, model, LORA, seed=1)
        written = replica.log.stat().st_size
        long = make_generate("job-l", 0)
        long.groups[0].prompt = "x" * (MAX_PROMPT_BYTES + 1)
        wide = make_generate("job-l", 0)
        wide.groups[0].prompt = "\u2603" * (MAX_PROMPT_BYTES // 3 + 1)
        negative = make_generate("job-l", 0)
        negative.sampling.guidance_scale, negative.sampling.negative_prompt = 2.0, "x" * 10_000_000
        unused = make_generate("job-l", 0)
        unused.sampling.negative_prompt = "x" * (MAX_PROMPT_BYTES + 1)
        name = make_generate("job-l" * 1_000_000, 0)
        for request in (long, wide, negative, unused, name):
            code, message = await c.refusal(c.generate(request))
            assert code is Code.INVALID_ARGUMENT, message
        method = c.channel.unary_stream("/flowfleet.v1.RolloutService/Generate")
        code, _ = await c.refusal(method(b"\xff" * 64, timeout=10).read())
        assert code is Code.INVALID_ARGUMENT
        for timeout_s in (-1.0, float("nan"), float("inf")):
            code, _ = await c.refusal(c.call("Drain", rollout_pb2.DrainRequest(timeout_s=timeout_s)))
            assert code is Code.INVALID_ARGUMENT
        await c.start("job-l", 1)
        huge = common_pb2.BlobRef(uri="redis:ff:job-l:blob", size_bytes=2**63)
        code, message = await c.refusal(c.update_adapter("job-l", 1, huge))
        assert (code, "at most" in message) == (Code.INVALID_ARGUMENT, True)
        assert replica.log.stat().st_size - written < 100_000
        await c.publish_adapter("job-l", 1, model, LORA, seed=1)
        full = make_generate("job-l", 1)
        full.groups[0].prompt = "x" * MAX_PROMPT_BYTES
        assert len(await c.generate(full)) == 6


async def test_metrics_count_what_was_made(client: Any, model: ModelSpec, replica: ReplicaProcess) -> None:
    async with client() as c:
        await c.publish_adapter("job-m", 2, model, LORA, seed=1)
        await c.generate(make_generate("job-m", 2))
    async with httpx.AsyncClient() as browser:
        lines = (await browser.get(replica.metrics_url)).text.splitlines()
    assert 'flowfleet_rollout_samples_total{job="job-m"} 6.0' in lines
    assert "flowfleet_rollout_policy_version 2.0" in lines
    assert "flowfleet_rollout_in_flight 0.0" in lines
    parts = {line.partition('part="')[2].partition('"')[0] for line in lines if "rollout_seconds_total{" in line}
    assert parts == {"encode", "denoise", "decode", "publish"}
    sources = {line.partition('source="')[2].partition('"')[0] for line in lines if "rollout_prompts_total{" in line}
    assert sources == {"cache", "encoder"}


async def test_an_update_stops_admission_and_waits_for_what_runs(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-e", 0, model, LORA, seed=1)
        num_steps = await steps_of_a_second(c, "job-e")
        running = asyncio.create_task(c.generate(long_generate("job-e", 0, num_steps)))
        while not (await c.status()).in_flight:
            await asyncio.sleep(0.01)
        starting = asyncio.create_task(c.start("job-e", 1))
        while (await c.status()).state == SERVING:
            await asyncio.sleep(0.01)
        assert not starting.done()
        assert (await c.status()).in_flight == 6
        code, message = await c.refusal(c.generate(make_generate("job-e", 0)))
        assert (code, "being updated to version 1" in message) == (Code.FAILED_PRECONDITION, True)
        await starting
        assert (await c.status()).in_flight == 0
        assert {sample.policy_version for sample in await running} == {0}


async def test_an_update_waits_for_the_batch_at_work_and_not_for_what_gives_way(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-w", 0, model, LORA, seed=1)
        num_steps = await steps_of_a_second(c, "job-w")
        requests = [long_generate("job-w", 0, num_steps) for _ in range(3)]
        for step, request in enumerate(requests):
            request.step, request.gives_way = step, step < 2
        calls = []
        for number, request in enumerate(requests, start=1):
            calls.append(asyncio.create_task(c.generate(request)))
            while (await c.status()).in_flight < 6 * number:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the first has begun
        await c.start("job-w", 1)
        assert (await c.status()).in_flight == 0
        begun, gave_way, stayed = calls
        assert [sample.policy_version for sample in await begun + await stayed] == [0] * 12
        code, message = await c.refusal(gave_way)
        assert (code, "before the first denoising step" in message) == (Code.FAILED_PRECONDITION, True)

        state = make_adapter(model, LORA, 2)
        await c.update_adapter("job-w", 1, await c.put_adapter("job-w", state))
        await c.finish("job-w", 1, weights.tensor_hashes(state.items()))
        again = requests[1]
        again.policy_version = 1
        assert {sample.policy_version for sample in await c.generate(again)} == {1}


async def test_work_that_nobody_waits_for_is_dropped(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        await c.publish_adapter("job-f", 0, model, LORA, seed=1)
        num_steps = await steps_of_a_second(c, "job-f")
        started = time.monotonic()
        await c.generate(long_generate("job-f", 0, num_steps))
        whole_s = time.monotonic() - started
        running = asyncio.create_task(c.generate(long_generate("job-f", 0, num_steps)))
        while not (await c.status()).in_flight:
            await asyncio.sleep(0.01)
        running.cancel()
        started = time.monotonic()
        while (await c.status()).in_flight:
            await asyncio.sleep(0.01)
        assert time.monotonic() - started < whole_s / 2
        assert len(await c.generate(make_generate("job-f", 0))) == 6


async def test_a_broadcast_that_its_trainer_gives_up_frees_the_replica_at_once(client: Any, model: ModelSpec) -> None:
    timeout_s = 60.0
    async with client() as c:
        tensors = make_weights(model, 0.01)
        buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=200_000)
        first = Sender("gone-1", timeout_s)
        await asyncio.gather(first.join(), c.init("job-h", model, group=first.replica_group()))
        await c.start("job-h", 0)
        source = rollout_pb2.Broadcast(group_id="gone-1", buckets=buckets)
        request = rollout_pb2.UpdateWeightsRequest(job_id="job-h", version=0, broadcast=source)
        receiving = asyncio.create_task(c.call("UpdateWeights", request))
        await first.send(buckets[:1], tensors)
        started = time.monotonic()
        receiving.cancel()

        absent = Sender("gone-2", timeout_s)  # a group that never forms, given up as well
        joining = asyncio.create_task(c.init("job-h", model, group=absent.replica_group()))
        await asyncio.sleep(0.5)
        joining.cancel()

        second = Sender("here", timeout_s)
        await asyncio.gather(second.join(), c.init("job-h", model, group=second.replica_group()))
        assert time.monotonic() - started < timeout_s / 3
        assert (await c.status()).state == IDLE


async def test_full_weights_by_broadcast_survive_a_trainer_that_vanishes(client: Any, model: ModelSpec) -> None:
    async def join(c: Client, group_id: str, timeout_s: float) -> Sender:
        sender = Sender(group_id, timeout_s)
        await asyncio.gather(sender.join(), c.init("job-g", model, group=sender.replica_group()))
        return sender

    def update(version: int, group_id: str, buckets: list[rollout_pb2.Bucket]) -> Any:
        broadcast = rollout_pb2.Broadcast(group_id=group_id, buckets=buckets)
        return rollout_pb2.UpdateWeightsRequest(job_id="job-g", version=version, broadcast=broadcast)

    async def publish(c: Client, sender: Sender, version: int, tensors: dict[str, torch.Tensor]) -> None:
        buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=200_000)
        await c.start("job-g", version)
        receiving = asyncio.create_task(c.call("UpdateWeights", update(version, sender.group.group_id, buckets)))
        await asyncio.gather(sender.send(buckets, tensors), receiving)
        await c.finish("job-g", version, weights.tensor_hashes(tensors.items()))

    async with client() as c:
        tensors = make_weights(model, 0.01)
        sender = await join(c, "g1", timeout_s=30)
        await publish(c, sender, 0, tensors)
        first = await c.generate(make_generate("job-g", 0))
        status = await c.status()
        assert status.weights_digest == weights.digest(weights.tensor_hashes(tensors.items()))

        # The same group again; then a bucket that never comes.
        await publish(c, sender, 1, make_weights(model, 0.02))
        broken = await join(c, "g2", timeout_s=2)
        buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=200_000)
        assert len(buckets) > 1
        await c.start("job-g", 2)
        started = time.monotonic()
        receiving = asyncio.create_task(c.refusal(c.call("UpdateWeights", update(2, "g2", buckets))))
        await broken.send(buckets[:1], tensors)
        code, message = await receiving
        assert (code, "broadcast failed" in message) == (Code.DATA_LOSS, True)
        assert time.monotonic() - started < 10
        assert (await c.status()).state == IDLE
        code, _ = await c.refusal(c.generate(make_generate("job-g", 2)))
        assert code is Code.FAILED_PRECONDITION

        sender = await join(c, "g3", timeout_s=30)
        await publish(c, sender, 2, tensors)
        last = await c.generate(make_generate("job-g", 2))
        assert [s.media.sha256 for s in last] == [s.media.sha256 for s in first]

        # Another job gets the base model back: its untrained adapter changes nothing of it.
        await c.publish_adapter("job-a", 0, model, LORA, seed=1)
        await check_against_engine(
            c, await c.generate(make_generate("job-a", 0)), make_adapter(model, LORA, seed=1), model
        )


async def test_wrong_flags_and_settings_end_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, named in ((("--host", "0.0.0.0"), "FLOWFLEET_RPC_TOKEN"), (("--threads", "0"), "at least 1")):
        with pytest.raises(AssertionError, match=named):
            ReplicaProcess(tmp_path, "redis://127.0.0.1:1/0", *flags)
    monkeypatch.setenv("FLOWFLEET_REDIS_URL", "redis://127.0.0.1:1/0")
    for flags, named in (
        (("--model", "/nowhere"), "/nowhere"),
        (("--device", "gpu0"), "gpu0"),
        (("--host", "::"), "--advertise"),
    ):
        with pytest.raises(ValueError, match=named):
            await serve(parser().parse_args(flags))


async def test_sigterm_finishes_what_runs_and_takes_no_more(
    client: Any, model: ModelSpec, replica: ReplicaProcess
) -> None:
    """The last test: the replica of this file ends with it."""
    async with client() as c:
        await c.publish_adapter("job-h", 0, model, LORA, seed=1)
        record = await ReplicaDirectory(c.redis).get("r0")
        assert record is not None
        assert (record.state, record.job_id, record.version) == ("serving", "job-h", 0)
        num_steps = await steps_of_a_second(c, "job-h")
        running = asyncio.create_task(c.generate(long_generate("job-h", 0, num_steps)))
        while not (await c.status()).in_flight:
            await asyncio.sleep(0.01)
        replica.terminate()
        while (await c.status()).state != rollout_pb2.ROLLOUT_STATE_DRAINING:
            await asyncio.sleep(0.01)
        assert not running.done()
        async with grpc.aio.insecure_channel(c.address) as channel:  # It does not retry until the replica is gone.
            late = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(make_generate("job-h", 0), timeout=10)
            code, message = await c.refusal(anext(aiter(late)))
        assert (code, "draining" in message) == (Code.UNAVAILABLE, True)
        assert len(await running) == 6
        assert await ReplicaDirectory(c.redis).get("r0") is None
    assert replica.wait() == 0, replica.log.read_text()
