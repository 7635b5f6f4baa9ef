"""A replica as a real process, and a trainer's end of its weight updates."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import redis.asyncio
import torch

from flowfleet.data.blobs import RedisBlobs
from flowfleet.models.registry import adapter_for
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from flowfleet.rpc.endpoint import open_channel
from flowfleet.weights import lora, weights
from flowfleet.weights.transfer import TransferMember, TransferStore
from tests.filling import filling
from tests.forks import start
from tests.services.rollout.conftest import PROMPTS
from tests.streamed import streamed

TIMEOUT_S = 180.0


class ReplicaProcess:
    """`python -m services.rollout` with one CPU thread, up when made."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        *flags: str,
        module: Sequence[str] = ("services.rollout",),
        cwd: Path | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        port_file = directory / "port"
        argv = [sys.executable, "-m", *module, "--port-file", str(port_file), "--threads", "1", *flags]
        with self.log.open("wb") as log:
            environment = {**os.environ, "FLOWFLEET_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}
            self.process = start(argv, env=environment, output=log.fileno(), cwd=cwd)
        deadline = time.monotonic() + TIMEOUT_S
        while not port_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.address = port_file.read_text()

    @property
    def metrics_url(self) -> str:
        """URL from the log."""
        (url,) = re.findall(r"http://\S+/metrics", self.log.read_text())
        return str(url)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)


class Client:
    """One connection to a replica and to Redis. Use as `async with`."""

    def __init__(self, address: str, redis_url: str) -> None:
        self._channel = open_channel(address)
        self.address = address
        self.redis: redis.asyncio.Redis = connect(redis_url)
        self.blobs = RedisBlobs(self.redis)
        self.stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.channel = self._channel

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self.redis.aclose()

    async def call(self, method: str, request: Any, timeout: float = TIMEOUT_S) -> Any:
        return await getattr(self.stub, method)(request, timeout=timeout)

    async def status(self) -> Any:
        return await self.call("GetStatus", rollout_pb2.GetRolloutStatusRequest())

    async def generate(self, request: rollout_pb2.GenerateRequest) -> list[common_pb2.Sample]:
        """The samples, those to train on from the job's stream."""
        told = [event.sample async for event in self.stub.Generate(request, timeout=TIMEOUT_S)]
        if request.purpose != common_pb2.PURPOSE_TRAIN:
            return told
        assert all(sample == common_pb2.Sample(id=sample.id) for sample in told)
        return streamed(told, await self.redis.xrange(keys.trajectories(request.job_id)))

    async def refusal(self, call: Any) -> tuple[grpc.StatusCode, str]:
        """Code and message of a call that must fail."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"the call was answered: {answer}")

    # The four phases --------------------------------------------------------------------------------------------------

    async def init(self, job_id: str, model: rollout_pb2.ModelSpec, **more: Any) -> None:
        request = rollout_pb2.InitWeightTransferRequest(job_id=job_id, model=model, **more)
        await self.call("InitWeightTransfer", request)

    async def start(self, job_id: str, version: int) -> None:
        await self.call("StartWeightUpdate", rollout_pb2.StartWeightUpdateRequest(job_id=job_id, version=version))

    async def finish(self, job_id: str, version: int, hashes: Mapping[str, int]) -> None:
        request = rollout_pb2.FinishWeightUpdateRequest(job_id=job_id, version=version, hashes=dict(hashes))
        await self.call("FinishWeightUpdate", request)

    async def update_adapter(self, job_id: str, version: int, ref: common_pb2.BlobRef) -> None:
        await self.call("UpdateWeights", rollout_pb2.UpdateWeightsRequest(job_id=job_id, version=version, adapter=ref))

    async def put_adapter(self, job_id: str, state: Mapping[str, torch.Tensor]) -> common_pb2.BlobRef:
        return await self.blobs.put(keys.blob(job_id, "adapter"), lora.adapter_to_bytes(state))

    async def publish_adapter(
        self, job_id: str, version: int, model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec, seed: int
    ) -> dict[str, torch.Tensor]:
        """All four phases of an adapter update; returns the adapter."""
        state = make_adapter(model, spec, seed)
        await self.init(job_id, model, lora=spec)
        await self.start(job_id, version)
        await self.update_adapter(job_id, version, await self.put_adapter(job_id, state))
        await self.finish(job_id, version, weights.tensor_hashes(state.items()))
        return state


class Sender:
    """Trainer rank 0 of a broadcast to one replica, with a store of its own."""

    def __init__(self, group_id: str, timeout_s: float) -> None:
        self.store = TransferStore("127.0.0.1", timeout_s)
        self.group = rollout_pb2.TransferGroup(
            group_id=group_id,
            backend="gloo",
            store_host=self.store.host,
            store_port=self.store.port,
            world_size=2,
            timeout_s=timeout_s,
        )
        self.member: TransferMember | None = None

    def replica_group(self) -> rollout_pb2.TransferGroup:
        group = rollout_pb2.TransferGroup()
        group.CopyFrom(self.group)
        group.rank = 1
        return group

    async def join(self) -> None:
        self.member = await asyncio.to_thread(TransferMember.join, self.group, torch.device("cpu"), self.store)

    async def send(self, buckets: list[rollout_pb2.Bucket], tensors: Mapping[str, torch.Tensor]) -> None:
        assert self.member is not None
        await asyncio.to_thread(weights.send, self.member, buckets, filling(tensors))


def make_adapter(model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec, seed: int) -> dict[str, torch.Tensor]:
    """An adapter as a trainer publishes it after some updates."""
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in lora.install_lora(adapter.experts, spec).items()}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def make_weights(model: rollout_pb2.ModelSpec, shift: float) -> dict[str, torch.Tensor]:
    """Every parameter of every transformer, moved by `shift`."""
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    return {name: value + shift for name, value in weights.full_parameters(adapter.experts).items()}


def make_generate(job_id: str, version: int, /, **changes: Any) -> rollout_pb2.GenerateRequest:
    """Two groups of three training samples of step 7; seeds are 1000 group + index."""
    request = rollout_pb2.GenerateRequest(
        job_id=job_id,
        step=7,
        purpose=common_pb2.PURPOSE_TRAIN,
        policy_version=version,
        sampling=rollout_pb2.Sampling(height=32, width=48, num_inference_steps=4, guidance_scale=1.0),
        noise=rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[1, 2]),
        groups=[
            rollout_pb2.PromptGroup(
                group=group,
                prompt=PROMPTS[group],
                indices=[0, 1, 2],
                seeds=[1000 * group, 1000 * group + 1, 1000 * group + 2],
            )
            for group in range(2)
        ],
    )
    for name, value in changes.items():
        if hasattr(value, "DESCRIPTOR"):
            getattr(request, name).CopyFrom(value)
        else:
            setattr(request, name, value)
    return request
