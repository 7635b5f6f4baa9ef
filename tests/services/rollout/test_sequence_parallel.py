"""A replica whose samples two processes share, against a replica of one process: real processes, gRPC and Redis."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.data.replicas import ReplicaDirectory
from flowfleet.data.trajectories import Trajectory
from flowfleet.proto import rollout_pb2
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import weights
from services.rollout.__main__ import parser
from services.rollout.process import make_engine
from tests.services.rollout.replica import (
    TIMEOUT_S,
    Client,
    ReplicaProcess,
    Sender,
    make_adapter,
    make_generate,
    make_weights,
)
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[3]
RECIPE = ModelSpec(path=str(ROOT / "recipes/tiny_video/model"), dtype="float32")
SPEC = LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_v", "ffn.net.2"])
LOADING = f"loading {RECIPE.path} "
INVALID = grpc.StatusCode.INVALID_ARGUMENT
TOLERANCE = 1e-5
Run = Callable[[Client], Any]


def replica(directory: Path, redis_url: str, size: int) -> ReplicaProcess:
    return ReplicaProcess(directory, redis_url, "--sequence-parallel-size", str(size))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, redis_of_module: str) -> Iterator[ReplicaProcess]:
    yield from serving(replica(tmp_path_factory.mktemp("one"), redis_of_module, 1))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, redis_of_module: str) -> Iterator[ReplicaProcess]:
    yield from serving(replica(tmp_path_factory.mktemp("two"), redis_of_module, 2))


def serving(process: ReplicaProcess) -> Iterator[ReplicaProcess]:
    yield process
    process.terminate()
    assert process.wait() == 0, process.log.read_text()


def request(job_id: str, version: int, **sampling: Any) -> rollout_pb2.GenerateRequest:
    usual = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 1.0}
    return make_generate(job_id, version, sampling=rollout_pb2.Sampling(**usual | sampling))


async def paths(client: Client, wanted: rollout_pb2.GenerateRequest) -> list[Trajectory]:
    samples = await client.generate(wanted)
    return [Trajectory.from_bytes(await client.blobs.get(sample.trajectory)) for sample in samples]


def assert_alike(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.next_latents, other.next_latents, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.allclose(one.log_probs, other.log_probs, atol=TOLERANCE, rtol=TOLERANCE)


async def both(one: ReplicaProcess, two: ReplicaProcess, redis_url: str, run: Run) -> tuple[Any, Any]:
    async with Client(one.address, redis_url) as a, Client(two.address, redis_url) as b:
        return await run(a), await run(b)


async def test_samples_of_published_adapters_are_those_of_one_process(
    one: ReplicaProcess, two: ReplicaProcess, redis_of_module: str
) -> None:
    """Two versions one after the other, plain and guided, and the KL to the policy without adapter."""

    async def run(client: Client) -> list[Any]:
        made: list[Any] = []
        for version in range(2):
            await client.publish_adapter("lora", version, RECIPE, SPEC, seed=version)
            made.append(await paths(client, request("lora", version)))
        made.append(await paths(client, request("lora", 1, guidance_scale=3.0, negative_prompt="A red circle")))
        wanted = request("lora", 1)
        wanted.reference_kl = True
        made.append([sample.reference_kl for sample in await client.generate(wanted)])
        return made

    ours, theirs = await both(one, two, redis_of_module, run)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert_alike(mine, other)
    assert not torch.allclose(ours[0][0].next_latents, ours[1][0].next_latents, atol=1e-3)
    assert min(theirs[3]) > 0
    assert theirs[3] == pytest.approx(ours[3], rel=1e-4)


@pytest.mark.parametrize("kind", ["wan_two_experts", "wan_5b", "qwen_image", "flux", "flux2_klein", "ltx2"])
async def test_full_weights_reach_both_experts_and_timesteps_and_prompts_are_split(
    one: ReplicaProcess, two: ReplicaProcess, redis_of_module: str, tmp_path: Path, kind: str
) -> None:
    model = ModelSpec(path=str(make_tiny(kind, tmp_path / kind)), dtype="float32")
    num_frames = 9 if kind == "ltx2" else 5 if "wan" in kind else 1

    async def run(client: Client) -> list[Trajectory]:
        tensors = make_weights(model, 0.01)
        buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=100_000)
        sender = Sender(f"{kind}-{client.address}", timeout_s=30)
        await asyncio.gather(sender.join(), client.init("full", model, group=sender.replica_group()))
        await client.start("full", 0)
        broadcast = rollout_pb2.Broadcast(group_id=sender.group.group_id, buckets=buckets)
        update = rollout_pb2.UpdateWeightsRequest(job_id="full", version=0, broadcast=broadcast)
        await asyncio.gather(sender.send(buckets, tensors), client.call("UpdateWeights", update))
        await client.finish("full", 0, weights.tensor_hashes(tensors.items()))
        return await paths(client, request("full", 0, num_frames=num_frames))

    assert_alike(*await both(one, two, redis_of_module, run))


async def test_devices_that_share_weights_deal_the_rows(
    one: ReplicaProcess, two: ReplicaProcess, redis_of_module: str, tmp_path: Path
) -> None:
    """Two versions, with guidance, whose branches are dealt too; 3 rows, so that one device repeats a row."""
    model = ModelSpec(path=str(make_tiny("hunyuan_image3", tmp_path / "model")), dtype="float32")
    spec = LoraSpec(rank=4, alpha=8.0, target_modules=["qkv_proj", "shared_mlp.down_proj"])

    async def run(client: Client) -> list[list[Trajectory]]:
        made = []
        for version in range(2):
            await client.publish_adapter("shares", version, model, spec, seed=version)
            made.append(await paths(client, request("shares", version, num_frames=1, guidance_scale=1.0 + version)))
        return made

    for mine, other in zip(*await both(one, two, redis_of_module, run), strict=True):
        assert_alike(mine, other)
    assert two.log.read_text().count(f"holds 50 % of the weights of {model.path}") == 2  # both ranks
    async with Client(two.address, redis_of_module) as client:
        merged = LoraSpec(rank=4, alpha=8.0, target_modules=["qkv_proj"], merged=True)
        for lora, remedy in ((None, 'set trainer.mode = "lora"'), (merged, 'set rollout.adapter = "separate"')):
            code, message = await client.refusal(client.init("other", model, lora=lora))
            assert (code, "share the weights of" in message, remedy in message) == (INVALID, True, True)


async def test_what_cannot_be_split_is_refused_and_the_replica_serves_on(
    two: ReplicaProcess, redis_of_module: str, tmp_path: Path
) -> None:
    async with Client(two.address, redis_of_module) as client:
        other = ModelSpec(path=str(make_tiny("z_image", tmp_path / "z_image")), dtype="float32")
        code, message = await client.refusal(client.init("other", other))
        assert (code, "Z-Image cannot split a sample over 2 devices" in message) == (INVALID, True)
        output = LoraSpec(rank=2, alpha=4.0, target_modules=["to_q", "proj_out"])
        code, message = await client.refusal(client.init("output", RECIPE, lora=output))
        assert (code, "target_modules: proj_out cannot be adapted" in message) == (INVALID, True)
        loaded = two.log.read_text().count(LOADING)
        await client.publish_adapter("after", 0, RECIPE, SPEC, seed=1)
        code, message = await client.refusal(client.generate(request("after", 0, height=16, width=48, num_frames=1)))
        assert (code, "2 devices cannot share 3 tokens evenly" in message) == (INVALID, True)
        assert await paths(client, request("after", 0))
    assert two.log.read_text().count(LOADING) == loaded  # both ranks refused alike: the model is as it was


async def test_heads_that_cannot_be_shared_are_refused_before_weights_are_read(
    two: ReplicaProcess, redis_of_module: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(RECIPE.path, tmp_path / "model")
    config = folder / "transformer/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": 3}))
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    async with Client(two.address, redis_of_module) as client:
        model = ModelSpec(path=str(folder), dtype="float32")
        code, message = await client.refusal(client.init("heads", model))
        assert (code, "2 devices cannot share the 3 attention heads of transformer" in message) == (INVALID, True)


async def test_it_says_how_many_devices_it_has(one: ReplicaProcess, two: ReplicaProcess, redis_of_module: str) -> None:
    async def run(client: Client) -> Any:
        status = await client.status()
        record = await ReplicaDirectory(client.redis).get(status.replica_id)
        return status.num_devices, record and record.num_devices

    assert await both(one, two, redis_of_module, run) == ((1, 1), (2, 2))


async def test_wrong_weights_are_refused_by_both(two: ReplicaProcess, redis_of_module: str) -> None:
    async with Client(two.address, redis_of_module) as client:
        state = await client.publish_adapter("wrong", 0, RECIPE, SPEC, seed=1)
        await client.start("wrong", 1)
        await client.update_adapter("wrong", 1, await client.put_adapter("wrong", make_adapter(RECIPE, SPEC, 2)))
        code, _ = await client.refusal(client.finish("wrong", 1, weights.tensor_hashes(state.items())))
        assert code is grpc.StatusCode.DATA_LOSS
        await client.publish_adapter("wrong", 1, RECIPE, SPEC, seed=2)
        assert await paths(client, request("wrong", 1))


@pytest.mark.parametrize("is_busy", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_follower_that_dies_ends_the_replica(tmp_path: Path, redis_url: str, is_busy: bool) -> None:
    process = replica(tmp_path / "replica", redis_url, 2)
    (follower,) = followers(process)
    async with Client(process.address, redis_url) as client:
        await client.publish_adapter("job", 0, RECIPE, SPEC, seed=1)
        call = asyncio.ensure_future(client.generate(request("job", 0, num_inference_steps=500 if is_busy else 4)))
        await (asyncio.sleep(1.0) if is_busy else asyncio.wait([call]))
        os.kill(follower.pid, signal.SIGKILL)
        began = time.monotonic()
        assert await asyncio.to_thread(process.wait) == 1
        assert time.monotonic() - began < 10
        if is_busy:
            with pytest.raises(grpc.aio.AioRpcError):
                await call
    assert "; the replica ends" in process.log.read_text()


@pytest.mark.long
async def test_a_follower_that_hangs_costs_the_replica_its_health(tmp_path: Path, redis_url: str) -> None:
    """What waited is made once the follower wakes."""
    flags = ("--hang-s", "1", "--stall-s", "30", "--sequence-parallel-size", "2")
    process = ReplicaProcess(tmp_path / "replica", redis_url, *flags)
    (follower,) = followers(process)
    async with Client(process.address, redis_url) as client:

        async def is_healthy() -> bool:
            health = health_pb2_grpc.HealthStub(client.channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def turns(healthy: bool) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while await is_healthy() != healthy:
                    await asyncio.sleep(0.1)

        await client.publish_adapter("job", 0, RECIPE, SPEC, seed=1)
        assert await paths(client, request("job", 0))  # the first has more time
        await turns(True)
        follower.suspend()
        call = asyncio.ensure_future(client.generate(request("job", 0)))
        await turns(False)
        assert not call.done()
        follower.resume()
        assert await call
        await turns(True)
    process.terminate()
    assert process.wait() == 0


def test_followers_that_never_met_end_at_once(tmp_path: Path, redis_url: str) -> None:
    process = replica(tmp_path / "replica", redis_url, 3)
    began = time.monotonic()
    process.terminate()
    assert process.wait() == 0
    assert time.monotonic() - began < 8


OUT_OF_MEMORY = """
import sys

import torch
from diffusers import WanTransformer3DModel


def forward(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory: 20 GiB")


if ("services.rollout.engines.follower" in sys.orig_argv) == {in_follower}:
    WanTransformer3DModel.forward = forward
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_a_forward_that_fails_is_answered_with_its_error_before_the_replica_ends(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The call that waits behind it is to be sent elsewhere."""
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY.format(in_follower=rank == 1))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    process = replica(tmp_path / "replica", redis_url, 2)
    async with Client(process.address, redis_url) as client:
        await client.publish_adapter("job", 0, RECIPE, SPEC, seed=1)
        calls = [client.refusal(client.generate(request("job", 0))) for _ in range(2)]
        found = dict(await asyncio.gather(*calls))
        assert found.keys() == {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
        error = f"rank {rank} of this replica: OutOfMemoryError: CUDA out of memory: 20 GiB"
        assert found[grpc.StatusCode.INTERNAL].endswith(error)
    assert await asyncio.to_thread(process.wait) == 1
    assert "; the replica ends" in process.log.read_text()


@pytest.mark.long
def test_a_replica_that_is_killed_takes_its_followers_with_it(tmp_path: Path, redis_url: str) -> None:
    process = replica(tmp_path / "replica", redis_url, 2)
    (follower,) = followers(process)
    process.process.kill()
    process.wait()
    psutil.wait_procs([follower], timeout=TIMEOUT_S)
    assert not follower.is_running()


def followers(process: ReplicaProcess) -> list[psutil.Process]:
    children = psutil.Process(process.process.pid).children()
    return [child for child in children if "services.rollout.engines.follower" in child.cmdline()]


@pytest.mark.parametrize("flags", [["--engine", "vllm-omni"], ["--sequence-parallel-size", "2"]])
def test_several_jobs_at_once_need_diffusers_on_one_device(flags: list[str]) -> None:
    options = parser().parse_args([*flags, "--adapter-slots", "4", "--device", "cpu"])
    with pytest.raises(ValueError, match="--adapter-slots 4: only --engine diffusers on one device"):
        make_engine(options)


def test_another_engine_is_refused() -> None:
    options = parser().parse_args(["--engine", "vllm-omni", "--sequence-parallel-size", "2", "--device", "cpu"])
    with pytest.raises(ValueError, match="--sequence-parallel-size 2: the engine vllm-omni samples on one device"):
        make_engine(options)
