"""One replica that samples for several jobs on one base."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import httpx
import pytest
import torch
from torch import Tensor

from flowfleet.data.replicas import VANISHED
from flowfleet.data.trajectories import Trajectory
from flowfleet.proto import rollout_pb2
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.redis import keys
from flowfleet.weights import weights
from flowfleet.weights.lora import adapter_to_bytes
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.sampling.requests import generation_request
from tests.services.rollout.conftest import LORA
from tests.services.rollout.replica import Client, ReplicaProcess, make_adapter, make_generate

Code = grpc.StatusCode
SLOTS = 4
WIDE = LoraSpec(rank=6, alpha=3.0, target_modules=LORA.target_modules)


@pytest.fixture(scope="module")
def replica(
    tmp_path_factory: pytest.TempPathFactory, model: ModelSpec, redis_of_module: str
) -> Iterator[ReplicaProcess]:
    flags = (
        "--replica-id",
        "r0",
        "--max-batch",
        "32",
        "--metrics-port",
        "0",
        "--threads",
        "1",
        "--adapter-slots",
        str(SLOTS),
    )
    process = ReplicaProcess(tmp_path_factory.mktemp("replica"), redis_of_module, *flags)
    yield process
    process.terminate()
    assert process.wait() == 0, process.log.read_text()


@pytest.fixture
def client(replica: ReplicaProcess, redis_of_module: str) -> Any:
    return lambda: Client(replica.address, redis_of_module)


class Job:
    """A job with one adapter in the blob store."""

    def __init__(self, c: Client, model: ModelSpec, job_id: str, seed: int, lora: LoraSpec = LORA) -> None:
        self.c, self.model, self.job_id, self.lora, self.seed = c, model, job_id, lora, seed
        self.state = make_adapter(model, lora, seed)
        self.adapter = rollout_pb2.Adapter(model=model, lora=lora)

    async def store(self) -> "Job":
        data = adapter_to_bytes(self.state)
        self.adapter.blob.CopyFrom(await self.c.blobs.put(keys.blob(self.job_id, "adapter", self.seed), data))
        return self

    def request(self, version: int = 0, *, alone: bool = True, rows: int = 32, **changes: Any) -> Any:
        digest = weights.digest(weights.tensor_hashes(self.state.items()))
        share = rollout_pb2.Share(alone=alone, rows=rows)
        return make_generate(self.job_id, version, adapter=self.adapter, weights_digest=digest, share=share, **changes)

    async def paths(self, request: Any) -> list[Trajectory]:
        samples = await self.c.generate(request)
        return [Trajectory.from_bytes(await self.c.blobs.get(sample.trajectory)) for sample in samples]


async def alone(model: ModelSpec, lora: LoraSpec, state: Mapping[str, Tensor], request: Any) -> list[Trajectory]:
    """What an engine with nothing but this adapter makes."""
    engine = DiffusersEngine(torch.device("cpu"), max_batch=32, threads=1)
    await engine.prepare(model, lora)
    await engine.load_adapter(state)
    batches = [batch async for batch in engine.generate(generation_request(request), lambda: False)]
    await engine.close()
    return [sample.record for batch in batches for sample in batch.samples]  # type: ignore[misc]


def same(one: list[Trajectory], other: list[Trajectory]) -> bool:
    return [path.to_bytes() for path in one] == [path.to_bytes() for path in other]


async def test_jobs_that_want_their_own_forward_get_the_bits_that_they_have_alone(
    client: Any, model: ModelSpec
) -> None:
    async with client() as c:
        jobs = [
            await Job(c, model, f"job-{number}", number, lora).store() for number, lora in enumerate((LORA, WIDE, LORA))
        ]
        found = await asyncio.gather(*(job.paths(job.request()) for job in jobs for _ in range(2)))
        for number, job in enumerate(jobs):
            expected = await alone(model, job.lora, job.state, job.request())
            assert same(found[2 * number], expected)
            assert same(found[2 * number + 1], expected)
        status = await c.status()
        assert {held.job_id for held in status.held} == {job.job_id for job in jobs}
        await c.publish_adapter("job-p", 3, model, LORA, seed=1)  # a job that pushes has the replica to itself
        assert [held.job_id for held in (await c.status()).held] == ["job-p"]
        expected = await alone(model, LORA, jobs[0].state, jobs[0].request())
        assert same(await jobs[0].paths(jobs[0].request()), expected)


async def test_jobs_that_mix_get_samples_of_their_own_and_a_new_version_stops_none(
    client: Any, model: ModelSpec
) -> None:
    async with client() as c:
        jobs = [await Job(c, model, f"mix-{number}", number).store() for number in range(3)]
        newer = await Job(c, model, "mix-0", 9).store()
        calls = [job.c.generate(job.request(alone=False)) for job in jobs for _ in range(2)]
        *found, last = await asyncio.gather(*calls, newer.c.generate(newer.request(1, alone=False, step=8)))
        for number, samples in enumerate(found):
            assert {(s.id.job_id, s.policy_version) for s in samples} == {(f"mix-{number // 2}", 0)}
            assert len(samples) == 6
        assert {sample.policy_version for sample in last} == {1}


async def test_more_jobs_than_slots_take_them_one_after_the_other(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        jobs = [await Job(c, model, f"many-{number}", number).store() for number in range(6)]
        found = await asyncio.gather(*(job.c.generate(job.request()) for job in jobs))
        assert all(len(samples) == 6 for samples in found)
        status = await c.status()
        assert (status.slots, len(status.held)) == (SLOTS, SLOTS)


async def test_an_adapter_that_cannot_be_had_says_why_and_leaves_the_others(client: Any, model: ModelSpec) -> None:
    async with client() as c:
        good, bad = await Job(c, model, "good", 1).store(), await Job(c, model, "bad", 2).store()
        expected = await good.paths(good.request())

        async def refusal(request: Any) -> tuple[grpc.StatusCode, str]:
            answer, paths = await asyncio.gather(c.refusal(c.generate(request)), good.paths(good.request()))
            assert same(paths, expected)
            return answer

        other = bad.request()
        other.weights_digest = "0123456789ab"
        code, message = await refusal(other)
        assert (code, f"{VANISHED} of version 0 with the digest 0123456789ab" in message) == (
            Code.FAILED_PRECONDITION,
            True,
        )
        torn = bad.request()
        torn.adapter.lora.rank = 7
        code, message = await refusal(torn)
        assert code is Code.INVALID_ARGUMENT
        assert "expected torch.float32 (7" in message
        merged = bad.request()
        merged.adapter.lora.merged = True
        code, message = await refusal(merged)
        assert (code, "publish it" in message) == (Code.INVALID_ARGUMENT, True)
        foreign = await Job(c, model, "foreign", 3).store()
        foreign.adapter.lora.target_modules.append("to_nothing")
        code, message = await c.refusal(c.generate(foreign.request()))
        assert (code, "the model has no module 'to_nothing'" in message) == (Code.INVALID_ARGUMENT, True)
        assert same(await good.paths(good.request()), expected)
        lost = await Job(c, model, "lost", 4).store()
        await c.blobs.delete([lost.adapter.blob])
        code, message = await refusal(lost.request())
        assert (code, f"{VANISHED} of version 0: publish it again" in message) == (Code.FAILED_PRECONDITION, True)


async def test_seconds_of_jobs_and_of_none_are_those_of_the_replica(
    client: Any, model: ModelSpec, replica: ReplicaProcess
) -> None:
    async def accounted() -> tuple[float, dict[str, float]]:
        """Clock, and seconds by job; "" is idle."""
        async with httpx.AsyncClient() as browser:
            lines = (await browser.get(replica.metrics_url)).text.splitlines()
        seconds: dict[str, float] = {}
        for line in lines:
            if line.startswith("flowfleet_rollout_idle_seconds "):
                seconds[""] = float(line.split()[1])
            if line.startswith("flowfleet_rollout_seconds_total{") and 'part="publish"' not in line:
                job_id = line.partition('job="')[2].partition('"')[0]
                seconds[job_id] = seconds.get(job_id, 0.0) + float(line.split()[1])
        return time.monotonic(), seconds

    async with client() as c:
        jobs = [await Job(c, model, f"cost-{number}", number).store() for number in range(3)]
        sampling = rollout_pb2.Sampling(height=64, width=64, num_inference_steps=100, guidance_scale=1.0)
        for job in jobs:
            await job.c.generate(job.request(alone=False))
        began, before = await accounted()
        for _ in range(2):
            await asyncio.gather(*(job.c.generate(job.request(alone=False, sampling=sampling)) for job in jobs))
        ended, after = await accounted()
        spent = {name: value - before[name] for name, value in after.items()}
        costs = [spent[job.job_id] for job in jobs]
        assert min(costs) > 0.5 * max(costs)
        assert sum(spent.values()) == pytest.approx(ended - began, rel=0.05)
