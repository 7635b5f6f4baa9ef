"""What comes in by a job's stream from rollouts that are at fault, or hostile, and when it comes at a bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.data.streams import Delivery, TrajectoryStream
from flowfleet.proto import common_pb2
from flowfleet.redis import keys
from services.controller.job.machine import events as ev
from tests.services.controller.scripted import ScriptedReward
from tests.services.controller.test_control_plane import Job, Run, by_index, job, run
from tests.waiting import until

__all__ = ["job", "run"]


def forged(sample: common_pb2.Sample) -> list[tuple[common_pb2.Sample, str]]:
    """Samples like this one, each with one field that was not requested, and its error."""
    found = []

    def but(told: str, change: Callable[[common_pb2.Sample], Any]) -> None:
        copy = common_pb2.Sample()
        copy.CopyFrom(sample)
        change(copy)
        found.append((copy, told))

    but("its job is another", lambda s: setattr(s.id, "job_id", "another"))
    but("its seed is 7", lambda s: setattr(s, "seed", 7))
    but("its height is 8192", lambda s: setattr(s, "height", 8192))
    but("its number of frames is 9", lambda s: setattr(s, "num_frames", 9))
    but("its noisy steps is [1000]", lambda s: s.sde_steps.__setitem__(slice(None), [1000]))
    but("it has no trajectory", lambda s: s.ClearField("trajectory"))
    but("it has no media", lambda s: s.ClearField("media"))
    but("its media is file:///etc/passwd", lambda s: setattr(s.media, "uri", "file:///etc/passwd"))
    but("its prompt_embeds is redis:ff:other", lambda s: setattr(s.prompt_embeds, "uri", "redis:ff:other:blob:a"))
    but("its media's size is 9223372036854775808", lambda s: setattr(s.media, "size_bytes", 2**63))
    but("it is of step 18446744073709551615", lambda s: setattr(s.id, "step", 2**64 - 1))
    return found


async def test_samples_that_nobody_asked_for_become_dead_letters_and_cost_nothing(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        publish = TrajectoryStream.publish

        async def forging(stream: TrajectoryStream, sample: common_pb2.Sample) -> str:
            if (sample.id.step, sample.id.group, sample.id.index) == (1, 0, 2):
                for forgery, reason in forged(sample):
                    told.append(reason)
                    await publish(stream, forgery)
            return await publish(stream, sample)

        monkeypatch.setattr(TrajectoryStream, "publish", forging)
        record = await fleet.submit(job(rewards={"ocr": {}}))
        await fleet.reached(record.id, lambda now: now.progress.step == 2)
        dead = await fleet.redis.xrange(keys.dead_trajectories(record.id))
        record = await fleet.reached(record.id, lambda now: now.status is JobStatus.SUCCEEDED)
        reasons = [fields[b"reason"].decode() for _, fields in dead]
        assert all(reason.startswith(start) for reason, start in zip(reasons, told, strict=True)), reasons
        assert (record.results["samples_trained"], record.results["samples_dropped"]) == (16, {})
        assert record.results["duplicates"] == 0
        assert {item.sample.id.job_id for request in fleet.trainer.steps for item in request.samples} == {record.id}


async def test_a_duplicate_that_comes_as_its_sample_is_lost_has_its_reference_stored(run: Run, job: Job) -> None:
    """What the machine counts as sampled is what is stored, whatever was folded since the duplicate was read."""
    scoring = asyncio.Event()

    class WaitingReward(ScriptedReward):
        async def Score(self, request: Any, context: Any) -> Any:
            await scoring.wait()
            return await super().Score(request, context)

    async with run(ocr=WaitingReward(by_index)) as fleet:
        record = await fleet.submit(job(rewards={"ocr": {}}))
        while not (driver := fleet.runner._runner.drivers.get(record.id)) or not driver.machine.state.batches:
            await asyncio.sleep(0.02)
        batch = driver.machine.state.batches[0]
        await until(lambda: not batch.has("wanted"))
        references, field = keys.sample_refs(record.id, 0), "0/1"
        duplicate = common_pb2.Sample.FromString(await fleet.redis.hget(references, field))
        async with driver._lock:
            taking = asyncio.create_task(driver._take([Delivery("0-1", duplicate, 1)]))
            await asyncio.sleep(0.1)
            driver.machine.apply(ev.Lost(step=0, group=0, index=1))
            await fleet.redis.hdel(references, field)
        await taking
        assert batch.groups[0][1].status == "sampled"
        assert await fleet.redis.hexists(references, field)
        scoring.set()
        record = await fleet.reached(record.id, lambda now: now.status is JobStatus.SUCCEEDED)
        assert record.results["samples_trained"] == 16


async def test_a_blob_that_is_whole_and_holds_something_else_costs_no_job(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that it befell once is made again; one that it befalls each time is dropped."""
    forged: list[int] = []
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        put = fleet.rollout._put

        async def forging(request: Any, kind: str, group: Any, index: int, data: bytes) -> common_pb2.BlobRef:
            is_once = (kind, request.step, group.group, index) == ("trajectory", 0, 0, 1) and 1 not in forged
            is_forged = is_once or (kind, request.step, group.group, index) == ("trajectory", 1, 1, 2)
            if is_forged:
                forged.append(index)
            return await put(request, kind, group, index, b"forged" if is_forged else data)

        monkeypatch.setattr(fleet.rollout, "_put", forging)
        fleet.trainer.reads = True
        record = await fleet.run(job(rewards={"ocr": {}}))
        assert record.status is JobStatus.SUCCEEDED, record.reason
        assert forged == [1, 2, 2, 2, 2]
        assert record.results["samples_dropped"] == {"lost": 1}
        assert [len(request.samples) for request in fleet.trainer.steps] == [8, 8]
