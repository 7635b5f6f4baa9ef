"""Controllers as processes on one Redis: whichever leads is asked to leave, killed or suspended in mid-job, and the
other one brings the job to its end: each step is trained once, on all of its samples."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from flowfleet.data.blobs import open_blobs
from flowfleet.process.started import StartedProcess
from flowfleet.proto import reward_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.store.leadership import TTL_S
from tests.forks import start
from tests.services.controller.scripted import ScriptedReward, ScriptedRollout, ScriptedTrainer
from tests.waiting import until

STEPS, PROMPTS, GROUP = 40, 2, 4


class SlowRollout(ScriptedRollout):
    """A request takes a moment, so that there is a middle of a job."""

    async def Generate(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(0.2)
        async for event in super().Generate(request, context):
            yield event


class Controller:
    def __init__(self, process: StartedProcess, url: str) -> None:
        self.process, self.pid = process, process.pid
        self.client = httpx.AsyncClient(base_url=url, timeout=20)

    async def gauge(self) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("flowfleet_controller_leader ")))

    async def has_job_metrics(self) -> bool:
        return "flowfleet_critic_rewards_mean{" in (await self.client.get("/metrics")).text


class Scene:
    """Two controllers and what they drive."""

    module = "tests.services.controller.scripted_controller"

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.redis: Any = connect(redis_url)
        self.rollout = SlowRollout(self.redis, open_blobs(self.redis, "redis"))
        self.trainer = ScriptedTrainer(self.rollout)
        self._env = {**os.environ, "FLOWFLEET_REDIS_URL": redis_url}
        self._folder = folder
        self.controllers: list[Controller] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = grpc.aio.server()
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout, server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self.trainer, server)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(ScriptedReward(lambda _: 0.5), server)
        self.rollout.address = self._env["FLOWFLEET_SCRIPTED_TRAINER"] = (
            f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        )
        await server.start()
        renewing = asyncio.create_task(self.rollout.renew())
        try:
            self.controllers = [await self.start(), await self.start()]
            yield
        finally:
            for controller in self.controllers:
                await controller.client.aclose()
                controller.process.kill()
                await asyncio.to_thread(controller.process.wait)
            renewing.cancel()
            await server.stop(None)
            await self.redis.aclose()

    async def start(self) -> Controller:
        port_file = self._folder / f"port-{time.monotonic_ns()}"
        flags = ["--port", "0", "--port-file", str(port_file), "--state-dir", str(self._folder / "state")]
        flags += ["--data-root", str(self._folder)]
        reward = ["--reward", f"ocr={self.rollout.address}"]
        argv = [sys.executable, "-m", self.module, *flags, *reward]
        process = await asyncio.to_thread(start, argv, env=self._env, output=1, error=2)
        while not port_file.exists():
            assert process.poll() is None
            await asyncio.sleep(0.05)
        return Controller(process, f"http://{port_file.read_text()}")

    async def leader(self) -> int:
        """Pid; 0 while none leads."""
        held = await self.redis.get(keys.leader())
        return int(json.loads(held)["pid"]) if held else 0

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> float:
        """Seconds until it was so."""
        began = time.monotonic()
        await until(condition, timeout_s)
        return time.monotonic() - began


@pytest.mark.parametrize(
    ("number", "within_s"),
    [
        pytest.param(signal.SIGTERM, TTL_S / 2, marks=pytest.mark.long),
        (signal.SIGKILL, TTL_S / 2),
        pytest.param(signal.SIGSTOP, 1.5 * TTL_S, marks=pytest.mark.long),
    ],
)
async def test_the_other_controller_takes_over(
    redis_url: str,
    tmp_path: Path,
    job: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    within_s: float,
) -> None:
    rollout = {"prompts_per_step": PROMPTS, "group_size": GROUP, "batch_size": PROMPTS * GROUP}
    scene = Scene(redis_url, tmp_path)
    async with scene.running():
        before = await scene.leader()
        (leading,) = [one for one in scene.controllers if one.pid == before]
        (other,) = [one for one in scene.controllers if one.pid != before]
        answer = await other.client.post("/v1/jobs", json=job(rollout=rollout, schedule={"steps": STEPS}))
        assert answer.status_code == 202, answer.text
        record = f"/v1/jobs/{answer.json()['id']}"

        async def progressed(by: int) -> bool:
            found = (await other.client.get(record)).json()
            assert found["status"] != "failed", found["reason"]
            return int(found["progress"]["step"]) >= by

        await scene.until(lambda: progressed(3))
        assert [await one.gauge() for one in (leading, other)] == [1.0, 0.0]
        assert [await one.has_job_metrics() for one in (leading, other)] == [True, False]
        assert (await other.client.get("/readyz")).status_code == 200
        assert len((await other.client.get("/v1/fleet")).json()["replicas"]) == 1

        async def another_leads() -> bool:
            return await scene.leader() not in (0, before)

        os.kill(before, number)
        seconds = await scene.until(another_leads)
        done = len(scene.trainer.steps)
        again = await scene.until(lambda: progressed(done + 2))
        if number is signal.SIGSTOP:
            os.kill(before, signal.SIGCONT)

            async def follows() -> bool:
                return await leading.gauge() == 0.0

            await scene.until(follows)

        async def ended() -> bool:
            return (await other.client.get(record)).json()["status"] in ("succeeded", "failed", "cancelled")

        await scene.until(ended, 120)
        found = (await other.client.get(record)).json()
        assert (found["status"], found["reason"]) == ("succeeded", "")
        assert found["results"]["samples_trained"] == STEPS * PROMPTS * GROUP
        assert found["results"]["samples_dropped"] == {}
        assert [request.step for request in scene.trainer.steps] == list(range(STEPS))
        for request in scene.trainer.steps:
            identities = {(one.sample.id.group, one.sample.id.index) for one in request.samples}
            assert len(request.samples) == len(identities) == PROMPTS * GROUP
        assert await other.gauge() == 1.0
        with capsys.disabled():
            print(f"\n{number.name}: another controller leads after {seconds:.2f} s, two steps later {again:.2f} s")
        assert seconds < within_s
