"""No clock that is wrong when a controller starts deletes history."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.data.blobs import BlobStore
from flowfleet.redis import keys
from services.controller.retention.keep import DAY_S, MANY, MAX_SKEW_S, Keep, to_remove, too_many
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
    jobs = await end_jobs(store, clock, (91.0, *[30.0] * MANY))
    own = clock.now + own_s
    clock.now += redis_s
    await Keeper(store, blobs, Keep(), clock=lambda: own).look()
    is_right = redis_s == own_s == 0.0
    assert await left(store, jobs) == [not is_right, *[True] * MANY]
    held = await store.removal.held()
    assert ("limits remove no ended job" in held) == (redis_s != own_s)
    assert ("11 of 11 ended jobs exceed 90 days" in held) == (redis_s == own_s == YEAR_S)


async def test_limits_of_number_and_size_wait_as_well_and_what_was_deleted_goes(
    store: Store, blobs: BlobStore, clock: Clock
) -> None:
    jobs = await end_jobs(store, clock, (3.0, 2.0, 1.0))
    await store.jobs.request(jobs[2], "delete")
    await Keeper(store, blobs, Keep(jobs=0), clock=lambda: clock.now + 2 * MAX_SKEW_S).look()
    assert await left(store, jobs) == [True, True, False]


def ended(ages_days: Sequence[float], now: float) -> list[EndedJob]:
    return [EndedJob(str(number), now - age * DAY_S, False, "") for number, age in enumerate(ages_days)]


@pytest.mark.parametrize(("limit", "words"), [("days", "90 days"), ("jobs", "5 jobs"), ("gib", "5 GiB")])
def test_each_limit_waits_before_many_and_more_than_half_go_at_once(limit: str, words: str) -> None:
    now = 1e9

    def why(old: int, young: int) -> str:
        """Tries so many that go by the limit, and that stay."""
        jobs = ended([91.0 if limit == "days" else 1.0] * old + [1.0] * young, now)
        keep = Keep() if limit == "days" else Keep.model_validate({limit: young})
        gone = to_remove(jobs, {job.job_id: 2**30 if limit == "gib" else 0 for job in jobs}, keep, now)
        assert len(gone) == old
        return too_many(jobs, gone, keep, now)

    for old, young in ((1, 1), (MANY - 1, 1), (MANY, MANY), (30, 31)):
        assert why(old, young) == ""
    held = "Retention is paused: {} of {} ended jobs exceed {}. Check the clock; to remove them run `flowfleet delete "
    for old in (MANY, 25):
        assert why(old, 5).startswith(held.format(old, old + 5, words))


@pytest.mark.parametrize("keep", [Keep(jobs=0), Keep(days=0), Keep(gib=0)])
def test_limits_of_nothing_are_an_operators_word(keep: Keep) -> None:
    jobs = ended([1.0] * 30, 1e9)
    gone = to_remove(jobs, {job.job_id: 1 for job in jobs}, keep, 1e9)
    assert (len(gone), too_many(jobs, gone, keep, 1e9)) == (30, "")


async def test_the_only_job_goes_when_it_is_old(store: Store, blobs: BlobStore, clock: Clock) -> None:
    jobs = await end_jobs(store, clock, (91.0,))
    await Keeper(store, blobs, Keep(), clock=clock).look()
    assert await left(store, jobs) == [False]


async def test_the_operator_says_yes_by_deleting_what_ended_before(
    store: Store, blobs: BlobStore, clock: Clock
) -> None:
    old = (200.0, *[100.0] * (MANY - 1))
    jobs = await end_jobs(store, clock, (*old, 1.0))
    registry = CollectorRegistry()
    keeper = Keeper(store, blobs, Keep(), registry=registry, clock=clock)
    await keeper.look()
    assert await left(store, jobs) == [True] * (MANY + 1)
    assert registry.get_sample_value("flowfleet_controller_retention_held") == 1.0
    (time,) = re.findall(r"`flowfleet delete --before (20.*)`\.", await store.removal.held())
    end = datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp()
    for job in await store.removal.ended():
        if job.ended_at < end:
            await store.jobs.request(job.job_id, "delete")
    for _ in range(2):
        await keeper.look()
    assert registry.get_sample_value("flowfleet_controller_retention_held") == 0.0
    assert await left(store, jobs) == [False] * MANY + [True]


@pytest.mark.parametrize(("skew_s", "swept"), [(0.0, True), (2 * MAX_SKEW_S, False)])
async def test_pictures_are_swept_while_only_the_number_of_jobs_is_in_doubt(
    store: Store, blobs: BlobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, skew_s: float, swept: bool
) -> None:
    await end_jobs(store, clock, (91.0,) * MANY)
    sweep = AsyncMock()
    monkeypatch.setattr(blobs, "sweep", sweep)
    await Keeper(store, blobs, Keep(), clock=lambda: clock.now + skew_s).look()
    assert await store.removal.held()
    assert bool(sweep.await_count) == swept


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
