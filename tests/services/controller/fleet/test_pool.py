"""Which replicas a job is lent while its trainer updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowfleet.data.replicas import ReplicaDirectory
from flowfleet.job.spec import parse_job
from flowfleet.redis.client import connect
from services.controller.fleet.pool import RolloutPool
from services.controller.fleet.watch import FleetWatch
from tests.services.controller.fleet.test_replicas import record
from tests.services.controller.scripted import ScriptedReward, ScriptedTrainer, scripted_fleet


def job_of(folder: Path, samples: str = "no", steps: int = 2) -> dict[str, Any]:
    (folder / "train.txt").write_text("a\nb\n")
    return {
        "name": "pool",
        "model": {"path": str(folder / "m")},
        "data": {"train": str(folder / "train.txt")},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "trainer": {"mode": "lora", "samples": samples},
        "schedule": {"steps": steps, "max_staleness": 0 if samples == "only" else 1},
    }


@pytest.mark.parametrize(("samples", "waits"), [("idle", True), ("only", False)])
async def test_a_rank_next_to_rollouts_is_lent_again_when_the_update_has_ended(
    samples: str, waits: bool, redis_url: str, tmp_path: Path
) -> None:
    spec, redis = parse_job(job_of(tmp_path, samples)), connect(redis_url)
    watch = FleetWatch(redis)
    pool = RolloutPool(watch, "job", spec)
    watch.fleet.update([record("rank", pool=spec.trainer_pool)])

    async def lent() -> str:
        async with pool.replica(3, 3, 16) as replica:
            return replica.replica_id

    with pool.updating():
        with pool.updating():  # a publication for a newcomer, whose end is not the update's
            asked = asyncio.create_task(lent())
        await asyncio.sleep(0.1)
        assert asked.done() is not waits
    assert await asyncio.wait_for(asyncio.shield(asked), 5) == "rank"
    assert not watch.fleet.updating
    await redis.aclose()


@pytest.mark.parametrize("call", ["TrainStep", "PublishWeights"])
async def test_a_job_is_known_to_update_while_its_trainer_is_asked_for_a_step_or_to_publish(
    call: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, done = list[set[str]](), getattr(ScriptedTrainer, call)

    async def watched(self: ScriptedTrainer, request: Any, context: Any) -> Any:
        seen.append({*running.runner._fleet.fleet.updating})
        return await done(self, request, context)

    monkeypatch.setattr(ScriptedTrainer, call, watched)
    rewards = {"ocr": ScriptedReward(lambda sample: len(sample.prompt))}
    async with scripted_fleet(redis_url, tmp_path / "state", rewards) as running:
        job = await running.run(job_of(tmp_path))
        assert seen
        assert all(jobs == {job.id} for jobs in seen)
        assert not running.runner._fleet.fleet.updating


@pytest.fixture
def slow_for_ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """A trainer whose rank takes a version, but the last two, a while after a rollout was asked for samples of it.
    Which versions it was asked to give to whom."""
    order, done = list[tuple[int, list[str]]](), ScriptedTrainer.PublishWeights

    async def publish(self: ScriptedTrainer, request: Any, context: Any) -> Any:
        replicas = [replica.replica_id for replica in request.replicas]
        order.append((request.version, replicas))
        while "rank" in replicas and request.version < 3 and not asked_for(self, request.version):
            await asyncio.sleep(0.01)
        if "rank" in replicas:
            await asyncio.sleep(0.05)
        return await done(self, request, context)

    def asked_for(trainer: ScriptedTrainer, version: int) -> bool:
        return any(request.policy_version == version for request in trainer.rollout.requests)

    monkeypatch.setattr(ScriptedTrainer, "PublishWeights", publish)
    return order


async def test_rollouts_sample_with_a_version_while_a_rank_of_the_trainer_still_waits_for_it(
    redis_url: str, tmp_path: Path, slow_for_ranks: list[tuple[int, list[str]]]
) -> None:
    """A step that is ready meanwhile waits as well: the rank would miss a version that the trainer no longer holds."""
    rewards = {"ocr": ScriptedReward(lambda sample: len(sample.prompt))}
    async with scripted_fleet(redis_url, tmp_path / "state", rewards) as running:
        rank = record("rank", address=running.rollout.address, pool="default.trainer", state="updating", job_id="")
        await ReplicaDirectory(running.redis).put(rank)
        await running.runner._fleet.refresh()
        job = await asyncio.wait_for(running.run(job_of(tmp_path, "idle", steps=4)), 60)
        assert running.trainer.refused == []
    assert job.status == "succeeded"
    assert slow_for_ranks[:8] == [(version, [to]) for version in range(4) for to in ("r0", "rank")]
