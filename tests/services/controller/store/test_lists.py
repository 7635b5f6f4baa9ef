"""Rows of jobs: what a list shows, also of jobs of earlier releases, and their curves in few points."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from flowfleet.api.overview import Curve
from flowfleet.job.spec import parse_job
from flowfleet.redis import keys
from services.controller.store.events import MAX_NOTICES
from services.controller.store.lists import MAX_POINTS, with_point
from services.controller.store.store import Store

SPEC = parse_job(
    {
        "name": "signs",
        "model": {"path": "/m/tiny/"},
        "data": {"train": "p"},
        "rewards": {"ocr": {}},
        "rollout": {"pool": "big"},
    }
)


async def test_a_row_has_what_the_record_has(redis: Redis) -> None:
    store = Store(redis)
    record, _ = await store.jobs.create(SPEC, owner="ann")
    await store.jobs.update_progress(record.id, announce=False, samples=8, samples_sampled=3)
    for step, reward in enumerate((0.25, None, 0.5)):
        await store.lists.add_point(record.id, step, reward)
    (row,) = await store.lists.rows([record.id, "not-there"])
    assert (row.name, row.owner, row.pool, row.model, row.algorithm) == ("signs", "ann", "big", "tiny", "flow_grpo")
    assert (row.progress.samples, row.progress.samples_sampled, row.progress.steps) == (8, 3, SPEC.schedule.steps)
    assert row.curve == Curve(stride=1, values=(0.25, None, 0.5))
    shown = await store.jobs.get(record.id)
    assert (row.created_at, row.status, row.progress, row.owner) == (
        shown.created_at,
        shown.status,
        shown.progress,
        shown.owner,
    )
    await redis.hdel(keys.job(record.id), "brief", "owner", "curve")  # as an earlier release stored it
    (old,) = await store.lists.rows([record.id])
    assert old == row.model_copy(update={"owner": "", "curve": Curve()})


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 1000, 4097])
def test_a_curve_of_any_length_has_few_points_at_its_steps(steps: int) -> None:
    curve = Curve()
    for step in range(steps):
        curve = with_point(curve, step, float(step))
        curve = with_point(curve, step, float(step))  # a step that is done again
    assert len(curve.values) <= MAX_POINTS
    assert list(curve.values) == [float(i * curve.stride) for i in range(len(curve.values))]
    assert (len(curve.values) - 1) * curve.stride + curve.stride >= steps


def test_steps_that_are_missing_are_gaps() -> None:
    assert with_point(Curve(), 2, 1.0).values == (None, None, 1.0)


async def test_notices_are_few_and_name_every_change(redis: Redis) -> None:
    store = Store(redis)
    record, _ = await store.jobs.create(SPEC)
    after = await store.notices.last()
    await store.events.append(record.id, "phase", {})
    await store.jobs.update_progress(record.id, announce=False, samples=1)
    await store.jobs.set_status(record.id, "cancelled")
    await store.jobs.request(record.id, "delete")
    await store.removal.remove(record.id, "was deleted")
    assert [job_id for _, job_id in await store.notices.after(after, 0.1)] == [record.id] * 5
    assert await store.notices.after(await store.notices.last(), 0.01) == []
    for _ in range(MAX_NOTICES + 500):
        await store.events.append("any", "phase", {})
    assert await redis.xlen(keys.notices()) < MAX_NOTICES + 200


async def test_hours_add_up_and_bring_no_job_back(redis: Redis) -> None:
    store = Store(redis)
    record, _ = await store.jobs.create(SPEC)
    assert record.accelerator_hours == {}
    for _ in range(2):
        await store.lists.add_seconds(record.id, {"trainer": 1800.0, "rollout": 450.0})
    assert (await store.jobs.get(record.id)).accelerator_hours == {"rollout": 0.25, "trainer": 1.0}
    (row,) = await store.lists.rows([record.id])
    assert row.accelerator_hours == {"rollout": 0.25, "trainer": 1.0}
    await store.lists.add_seconds("gone", {"trainer": 1.0})
    assert not await redis.exists(keys.job("gone"))
