"""No clock that is wrong when a controller starts deletes history."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.data.blobs import BlobStore
from flowfleet.errors import NotFound
from flowfleet.redis import keys
from services.controller.retention.keep import DAY_S, MAX_SKEW_S, Keep, why_held
from services.controller.retention.keeper import Keeper
from services.controller.store.removal import EndedJob
from services.controller.store.store import Store
from tests.services.controller.conftest import Api
from tests.services.controller.retention.conftest import Clock, spec

YEAR_S = 365 * DAY_S
WRONG_S = (0.0, YEAR_S, -YEAR_S, -1_700_000_000.0)
"""How far a clock is off: right, ahead, behind, and at the epoch."""


async def end_jobs(store: Store, clock: Clock, ages_days: tuple[float, ...]) -> list[str]:
    """Ended jobs of these ages, the oldest first."""
    now, found = clock.now, []
    for age in ages_days:
        clock.now = now - age * DAY_S
        job_id = (await store.jobs.create(spec()))[0].id
        await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
        found.append(job_id)
    clock.now = now
    return found


async def left(store: Store, job_ids: list[str]) -> list[bool]:
    return [await store.removal.exists(job_id) for job_id in job_ids]


@pytest.mark.parametrize(("redis_s", "own_s"), [*itertools.product(WRONG_S, WRONG_S)])
async def test_a_clock_that_is_wrong_at_start_deletes_no_history(
    store: Store, blobs: BlobStore, clock: Clock, redis_s: float, own_s: float
) -> None:
    """All combinations: with both right the one old job goes, with both equally wrong more than half would."""
    jobs = await end_jobs(store, clock, (91.0, 30.0, 1.0, 0.0))
    own = clock.now + own_s
    clock.now += redis_s
    await Keeper(store, blobs, Keep(), clock=lambda: own).look()
    is_right = redis_s == own_s == 0.0
    assert await left(store, jobs) == [not is_right, True, True, True]
    held = await store.removal.held()
    assert ("limits remove no ended job" in held) == (redis_s != own_s)
    assert ("more than half go only by an operator's word" in held) == (redis_s == own_s == YEAR_S)


async def test_limits_of_number_and_size_wait_as_well_and_what_was_deleted_goes(
    store: Store, blobs: BlobStore, clock: Clock
) -> None:
    jobs = await end_jobs(store, clock, (3.0, 2.0, 1.0))
    await store.jobs.request(jobs[2], "delete")
    await Keeper(store, blobs, Keep(jobs=0), clock=lambda: clock.now + 2 * MAX_SKEW_S).look()
    assert await left(store, jobs) == [True, True, False]


def test_half_may_go_and_no_more() -> None:
    now = 1e9
    for old, young in ((1, 1), (2, 2), (5, 6), (0, 0), (0, 3)):
        jobs = [EndedJob(str(n), now - 91 * DAY_S, False, "") for n in range(old)]
        jobs += [EndedJob(f"y{n}", now, False, "") for n in range(young)]
        assert why_held(jobs, Keep(), now, now) == ""
    jobs = [EndedJob(name, now - age * DAY_S, False, "") for name, age in (("a", 91), ("b", 91), ("c", 1))]
    assert "2 of 3 ended jobs are older than 90 days" in why_held(jobs, Keep(), now, now)
    assert why_held(jobs, Keep(days=0), now, now) == ""  # needs no clock


async def test_the_operator_says_yes_by_deleting_what_ended_before(
    store: Store, blobs: BlobStore, clock: Clock
) -> None:
    jobs = await end_jobs(store, clock, (200.0, 100.0, 1.0))
    registry = CollectorRegistry()
    keeper = Keeper(store, blobs, Keep(), registry=registry, clock=clock)
    await keeper.look()
    assert await left(store, jobs) == [True, True, True]
    assert registry.get_sample_value("flowfleet_controller_retention_held") == 1.0
    assert "`flowfleet delete --before 20" in await store.removal.held()
    for job_id in jobs[:2]:
        await store.jobs.request(job_id, "delete")
    await keeper.look()
    for job_id in jobs[:2]:
        with pytest.raises(NotFound):
            await store.jobs.get(job_id)
    await keeper.look()
    assert registry.get_sample_value("flowfleet_controller_retention_held") == 0.0
    assert await left(store, jobs) == [False, False, True]


async def test_times_of_jobs_are_by_redis(redis: object, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(redis)  # type: ignore[arg-type]
    monkeypatch.setattr("time.time", lambda: 0.0)
    before = await store.link.now()
    record, _ = await store.jobs.create(spec())
    await store.jobs.set_status(record.id, JobStatus.RUNNING)
    await store.jobs.set_status(record.id, JobStatus.SUCCEEDED)
    record = await store.jobs.get(record.id)
    after = await store.link.now()
    for at in (record.created_at, record.started_at, record.ended_at):
        assert at is not None
        assert before <= at.timestamp() <= after


async def test_a_retention_that_waits_is_an_alert(api: Api) -> None:
    await api.store.removal.hold("two clocks differ")
    (alert,) = (await api.client.get("/v1/alerts")).json()
    assert (alert["name"], alert["text"]) == ("FlowfleetRetentionHeld", "retention history: two clocks differ")
    await api.store.link.redis.delete(keys.retention())
    assert (await api.client.get("/v1/alerts")).json() == []
