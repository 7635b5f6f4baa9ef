"""A replica whose engine's thread is stuck for good says so, and one that only takes its time does not."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.data.replicas import ReplicaDirectory
from flowfleet.proto.rollout_pb2 import ModelSpec
from tests.services.rollout.conftest import LORA
from tests.services.rollout.replica import Client, ReplicaProcess, make_generate
from tests.waiting import until

HANG_S = 1.0


def replica(directory: Path, redis_url: str, order: Path) -> ReplicaProcess:
    flags = ("--replica-id", "r0", "--hang-s", str(HANG_S), "--stall-s", "600")
    return ReplicaProcess(directory, redis_url, *flags, module=("tests.services.rollout.stuck_replica", str(order)))


async def is_serving(client: Client) -> bool:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def healthy_during(client: Client, work: Awaitable[object]) -> None:
    task = asyncio.ensure_future(work)
    while not task.done():
        assert await is_serving(client)
        await asyncio.sleep(0.1)
    await task


@pytest.mark.long
async def test_a_stuck_engine_denies_health_and_its_successor_makes_the_same(
    tmp_path: Path, redis_url: str, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_S", str(3 * HANG_S))
    order = tmp_path / "order"
    order.write_text(str(3 * HANG_S))
    old = replica(tmp_path / "old", redis_url, order)
    request = make_generate("job", 0)
    made: list[str] = []

    async def anew(successor: ReplicaProcess) -> None:
        async with Client(successor.address, redis_url) as client:
            await client.publish_adapter("job", 0, model, LORA, seed=1)
            again = [sample.trajectory.sha256 for sample in await client.generate(request)]
            assert again == made

    async with Client(old.address, redis_url) as client:
        await healthy_during(client, client.publish_adapter("job", 0, model, LORA, seed=1))
        await healthy_during(client, client.generate(request))  # the first of its size: it may compile
        order.write_text("0")
        made.extend(sample.trajectory.sha256 for sample in await client.generate(request))
        order.write_text("ever")
        call = asyncio.ensure_future(client.generate(request))
        began = time.monotonic()

        async def denies() -> bool:
            return not await is_serving(client)

        await until(denies, 60)
        assert time.monotonic() - began > HANG_S
        directory = ReplicaDirectory(client.redis)

        async def is_stale() -> bool:
            return "r0" in (await directory.look()).stale

        await until(is_stale, 60)  # it is not renewed: it gets no more work, and soon it is gone
        call.cancel()
    order.write_text("0")
    monkeypatch.setenv("LOAD_S", "0")
    successor = replica(tmp_path / "new", redis_url, order)
    await anew(successor)
    old.process.kill()
    old.wait()
    successor.terminate()
    assert successor.wait() == 0


@pytest.mark.long
async def test_one_that_was_suspended_and_replaced_ends_when_it_wakes(tmp_path: Path, redis_url: str) -> None:
    old = ReplicaProcess(tmp_path / "old", redis_url, "--replica-id", "r0")
    old.process.send_signal(signal.SIGSTOP)
    successor = ReplicaProcess(tmp_path / "new", redis_url, "--replica-id", "r0")
    old.process.send_signal(signal.SIGCONT)
    assert old.wait() == 1
    assert "another process registered" in old.log.read_text()
    async with Client(successor.address, redis_url) as client:
        record = await ReplicaDirectory(client.redis).get("r0")
        assert record is not None
        assert record.address == successor.address
        assert (await client.status()).incarnation == record.incarnation
    successor.terminate()
    assert successor.wait() == 0
