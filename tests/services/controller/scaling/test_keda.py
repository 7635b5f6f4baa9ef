"""The scaler over real gRPC, as KEDA calls it, with a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.job.spec import parse_job
from flowfleet.proto import externalscaler_pb2 as pb
from flowfleet.proto import externalscaler_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.scaling.demand import Demand, DemandHash
from services.controller.scaling.keda import Scaler, serve_scaler
from services.controller.store.leadership import Lease
from services.controller.store.store import Store

SPEC = parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})
DEADLINE_S = 5.0
POOL: Any = ("rollout", "default")


@dataclass
class Keda:
    """The operator's side, and the leader's."""

    stub: externalscaler_pb2_grpc.ExternalScalerAsyncStub
    redis: Any
    store: Store
    lease: Lease
    scaler: Scaler
    hash: DemandHash = field(init=False)

    def __post_init__(self) -> None:
        self.hash = DemandHash(self.redis)

    async def write(self, replicas: int) -> None:
        await self.hash.write(self.lease, {POOL: Demand(replicas=replicas)} if replicas else {})

    async def asked(self, component: str = "rollout", name: str = "default") -> tuple[bool, float]:
        """Activity and metric."""
        ref = reference(component, name)
        active = await self.stub.IsActive(ref, timeout=DEADLINE_S)
        request = pb.GetMetricsRequest(scaledObjectRef=ref, metricName="replicas")
        (value,) = (await self.stub.GetMetrics(request, timeout=DEADLINE_S)).metricValues
        assert (value.metricName, value.metricValue) == ("replicas", value.metricValueFloat)
        return active.result, value.metricValueFloat

    async def leaderless(self) -> None:
        await self.redis.hset(keys.demand(), "updated", 1)


class Known(StaticDirectory):
    def __init__(self, rewards: Mapping[str, str], pools: Collection[str] | None = None) -> None:
        super().__init__(rewards)
        self.pools = pools


def reference(component: str = "rollout", name: str = "default") -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="s", namespace="n", scalerMetadata={"component": component, "name": name})


@pytest.fixture
async def keda(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keda]:
    monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", "the fleet's, which KEDA does not have")
    redis = connect(redis_url)
    store, lease = Store(redis), Lease(redis)
    await lease._take()
    scaler = Scaler(redis, store, Known({"ocr": "127.0.0.1:1"}, ["default", "wide"]), stream_s=60.0)
    async with serve_scaler(scaler, "127.0.0.1", 0) as address, grpc.aio.insecure_channel(address) as channel:
        yield Keda(externalscaler_pb2_grpc.ExternalScalerStub(channel), redis, store, lease, scaler)
    await redis.aclose()


async def test_it_tells_what_the_leader_wants(keda: Keda) -> None:
    spec = (await keda.stub.GetMetricSpec(reference(), timeout=DEADLINE_S)).metricSpecs
    assert [(one.metricName, one.targetSize, one.targetSizeFloat) for one in spec] == [("replicas", 1, 1.0)]
    for replicas in (0, 1, 7, 0):
        await keda.write(replicas)
        assert await keda.asked() == (replicas > 0, replicas)
    assert await keda.asked("reward", "ocr") == (False, 0)


async def test_without_a_leader_what_it_wanted_stays_and_running_jobs_count(keda: Keda) -> None:
    assert await keda.asked() == (False, 0)  # an empty Redis
    job, _ = await keda.store.jobs.create(SPEC)
    assert await keda.asked() == (False, 0)  # its trainer may have no place yet
    await keda.store.jobs.set_status(job.id, JobStatus.RUNNING)
    assert await keda.asked() == (True, 1)  # no leader has written yet
    await keda.write(0)
    assert await keda.asked() == (False, 0)  # it knows better
    await keda.leaderless()
    assert await keda.asked() == (True, 1)
    await keda.write(5)
    await keda.leaderless()
    assert await keda.asked() == (True, 5)
    assert await keda.asked("reward", "ocr") == (True, 1)
    await keda.redis.delete(keys.demand())
    assert await keda.asked() == (True, 1)
    await keda.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert await keda.asked() == (False, 0)


async def test_trimmed_streams_change_nothing(keda: Keda) -> None:
    await keda.write(3)
    await keda.redis.xadd(keys.trajectories("job"), {"x": "y"})
    before = await keda.asked()
    await keda.redis.xtrim(keys.trajectories("job"), maxlen=0)
    assert await keda.asked() == before == (True, 3)


async def test_a_stream_tells_each_change_at_once(keda: Keda) -> None:
    await keda.write(0)
    stream = keda.stub.StreamIsActive(reference(), timeout=60)
    answers = aiter(stream)
    assert (await anext(answers)).result is False
    await asyncio.sleep(0.1)
    for replicas in (1, 0, 3):
        began = time.monotonic()
        await keda.write(replicas)
        assert (await asyncio.wait_for(anext(answers), DEADLINE_S)).result is (replicas > 0)
        assert time.monotonic() - began < 0.3
    await keda.write(4)  # still active: nothing to tell
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(anext(answers))), 0.5)


async def test_a_stream_ends_well_with_the_server_and_by_its_age(keda: Keda) -> None:
    """KEDA takes the end of a stream for a failure unless it is clean, and then waits longer and longer."""
    keda.scaler._stream_s = 0.2
    assert [answer.result async for answer in keda.stub.StreamIsActive(reference(), timeout=60)] == [False]
    keda.scaler._stream_s = 60.0
    stream = keda.stub.StreamIsActive(reference(), timeout=60)
    answers = aiter(stream)
    await anext(answers)
    await keda.scaler.stop()
    with pytest.raises(StopAsyncIteration):
        await anext(answers)
    assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("metadata", "code", "message"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "set component to one of rollout, reward and name"),
        ({"component": "rollout"}, grpc.StatusCode.INVALID_ARGUMENT, "ScaledObject n/s: set component"),
        ({"component": "trainer", "name": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "rollout, reward"),
        ({"component": "rollout", "name": "wied"}, grpc.StatusCode.NOT_FOUND, "the fleet has no rollout 'wied'"),
        ({"component": "reward", "name": "orc"}, grpc.StatusCode.NOT_FOUND, "the fleet has no reward 'orc'"),
    ],
)
async def test_a_trigger_that_names_nothing_is_told_so(
    keda: Keda, metadata: dict[str, str], code: grpc.StatusCode, message: str
) -> None:
    ref = pb.ScaledObjectRef(name="s", namespace="n", scalerMetadata=metadata)
    stream = keda.stub.StreamIsActive(ref, timeout=DEADLINE_S)
    calls = [keda.stub.IsActive(ref, timeout=DEADLINE_S), anext(aiter(stream))]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await call
        assert caught.value.code() is code


async def test_an_outage_is_an_error_and_not_idleness(keda: Keda, monkeypatch: pytest.MonkeyPatch) -> None:
    """KEDA leaves the replicas as they are when a scaler fails."""
    import redis.exceptions

    await keda.write(2)
    stream = aiter(keda.stub.StreamIsActive(reference(), timeout=60))
    assert (await anext(stream)).result is True

    async def away() -> None:
        raise redis.exceptions.ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(keda.scaler._hash, "read", away)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await keda.stub.IsActive(reference(), timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(1.2)
    await keda.write(0)
    assert (await asyncio.wait_for(anext(stream), DEADLINE_S)).result is False  # the same stream continues
