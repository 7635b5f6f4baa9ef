"""What stays of ended jobs, against a real Redis."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.votes import Asked, Ballot, VoteSample
from flowfleet.client.archive import Archive
from flowfleet.data.blobs import BlobStore, digest, open_blobs
from flowfleet.errors import Conflict, Gone, NotFound
from flowfleet.local.plan import StackOptions, make_plan, ports_needed
from flowfleet.local.secrets import StackSecrets
from flowfleet.process.service import usable_cpus
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.limits import Limits
from services.controller.retention.keep import DAY_S, Keep, to_remove
from services.controller.retention.keeper import READ_ALL_S, Keeper
from services.controller.retention.memory import Memory
from services.controller.settings import ControllerSettings
from services.controller.store import removal
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.store.removal import EndedJob
from services.controller.store.store import Store
from tests.services.controller.retention.conftest import Clock, history, spec

GIB = 2**30


def ended(job_id: str, at: float, *, wanted_gone: bool = False) -> EndedJob:
    return EndedJob(job_id, at, wanted_gone, "")


def test_the_first_to_end_goes_first_by_count_age_and_bytes() -> None:
    jobs = [ended(name, at) for name, at in (("a", 0.0), ("b", 1.0), ("c", 2.0), ("d", 3.0))]
    sizes = dict.fromkeys("abcd", GIB)
    assert to_remove(jobs, sizes, Keep(), 4.0) == {}
    assert list(to_remove(jobs, sizes, Keep(jobs=3), 4.0)) == ["a"]
    assert list(to_remove(jobs, sizes, Keep(jobs=0), 4.0)) == ["a", "b", "c", "d"]
    assert list(to_remove(jobs, sizes, Keep(gib=2.5), 4.0)) == ["a", "b"]
    assert list(to_remove(jobs, sizes, Keep(days=10), 10 * DAY_S + 1.5)) == ["a", "b"]
    assert list(to_remove([*jobs, ended("e", 9.0, wanted_gone=True)], sizes, Keep(jobs=4), 10.0)) == ["e"]


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"refuse_above=0.95 must not be greater than pause_above=0.9"):
        Keep(refuse_above=0.95)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--keep", "job=3"], "--keep job=3: give NAME=VALUE, with NAME one of jobs, days"),
        (["--keep", "jobs"], "--keep jobs: give NAME=VALUE"),
        (["--keep", "jobs=3", "--keep", "jobs=4"], "--keep jobs is given twice"),
        (["--keep", "jobs=-1"], "--keep jobs: Input should be greater than or equal to 0"),
        (["--keep", "days=nan"], "--keep days"),
        (["--keep", "detail_days=3"], "--keep detail_days was removed: an ended job stays whole until days"),
        (["--limit", "samples=3"], "--limit samples=3: give NAME=VALUE, with NAME one of samples_per_step, open_"),
        (["--limit", "open_samples=0"], "--limit open_samples: Input should be greater than or equal to 1"),
        (["--keep", "pause_above=0.5"], "--keep refuse_above=0.8 must not be greater than pause_above=0.5"),
    ],
)
def test_a_limit_that_cannot_work_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ControllerSettings.from_command_line(argv, {"FLOWFLEET_REDIS_URL": "redis://127.0.0.1:1/0"})


def test_limits_and_archive_reach_the_controller_of_a_stack(tmp_path: Path) -> None:
    options = StackOptions(
        state_dir=tmp_path, keep=("jobs=3", "days=0.5"), archive="s3://bucket/jobs", limits=("open_samples=9",)
    )
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], StackSecrets())
    process = next(process for process in plan.processes if process.name == "controller")
    settings = ControllerSettings.from_command_line(process.argv[3:], process.env)
    assert (settings.keep, settings.archive) == (Keep(jobs=3, days=0.5), "s3://bucket/jobs")
    assert settings.limits == Limits(open_samples=9, ranks=max(16, 2 * usable_cpus()))


def test_an_archive_url_holds_no_password() -> None:
    env = {"FLOWFLEET_REDIS_URL": "redis://127.0.0.1:1/0", "FLOWFLEET_ARCHIVE": "ftp://me:secret@host/jobs"}
    with pytest.raises(ValueError, match="leave user and password out of the URL"):
        ControllerSettings.from_command_line([], env)


def picture(job_id: str, step: int) -> BlobRef:
    data = f"picture {step}".encode()
    return BlobRef(uri=f"redis:{keys.blob(job_id, 'media', step)}", size_bytes=len(data), sha256=digest(data))


async def all_keys(redis: Any) -> set[bytes]:
    return {name async for name in redis.scan_iter()}


async def test_a_deleted_job_leaves_nothing_but_its_tombstone(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock
) -> None:
    before = await all_keys(redis)
    job_id = await history(store, blobs, key="key")
    with pytest.raises(Conflict, match="cancel it, wait until it has ended, then delete it"):
        await store.jobs.request(job_id, "delete")
    await store.jobs.set_status(job_id, JobStatus.CANCELLED)
    assert (await store.jobs.request(job_id, "delete")).desired == Desired.DELETED
    keeper = Keeper(store, blobs, Keep(), clock=clock)
    await keeper.look()
    left = await all_keys(redis) - before
    fleet = (keys.idempotency("key"), keys.tombstone(job_id), keys.leftovers(), keys.notices(), keys.removed())
    assert left == {name.encode() for name in fleet}
    assert 0 < await redis.pttl(keys.tombstone(job_id)) <= await redis.pttl(keys.idempotency("key")) + 1000
    for ask in (store.jobs.get, store.jobs.status):
        with pytest.raises(Gone, match=f"job {job_id} was deleted"):
            await ask(job_id)
    for submit in (store.jobs.create, store.jobs.find_submitted):
        with pytest.raises(Conflict, match=f"{job_id}, which was deleted: use a new key"):
            await submit(spec(), "key")
    assert await store.lists.page() == ([], None)

    late = keys.job_key(job_id, "blob", "late")
    await redis.set(late, b"from a replica that was slow")
    clock.now += removal.LATE_S
    await keeper.look()
    assert not await redis.exists(late)
    assert not await redis.exists(keys.leftovers())


async def test_a_look_reads_jobs_that_ended_or_are_to_be_deleted_alone(
    store: Store, blobs: BlobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ended jobs are read at first, and again after a while."""
    read: list[list[str] | None] = []
    ended_of = store.removal.ended

    async def noted(among: Sequence[str] | None = None) -> list[EndedJob]:
        found = await ended_of(among)
        read.append(None if among is None else [job.job_id for job in found])
        return found

    monkeypatch.setattr(store.removal, "ended", noted)
    first, second, third = [await history(store, blobs) for _ in range(3)]
    keeper = Keeper(store, blobs, Keep(), clock=clock)
    await store.jobs.set_status(first, JobStatus.SUCCEEDED)
    await keeper.look()
    await keeper.look()
    await store.jobs.set_status(second, JobStatus.FAILED)
    await keeper.look()
    await store.jobs.request(first, "delete")
    await keeper.look()
    assert read == [None, [], [second], [first]]
    assert not await store.removal.exists(first)
    assert await store.removal.exists(second)
    clock.now += READ_ALL_S
    await store.jobs.set_status(third, JobStatus.FAILED)
    await keeper.look()
    assert read[-1] is None


async def test_running_jobs_are_never_touched(store: Store, blobs: BlobStore, redis: Any, clock: Clock) -> None:
    running = await history(store, blobs)
    before = await all_keys(redis)
    old = await history(store, blobs)
    await store.jobs.set_status(old, JobStatus.SUCCEEDED)
    clock.now += 1000 * DAY_S
    keep = Keep(jobs=0, days=0, gib=0)
    await Keeper(store, blobs, keep, clock=clock).look()
    assert before <= await all_keys(redis)
    assert (len(await store.events.read(running)), len(await store.history.metrics(running))) == (5, 3)
    with pytest.raises(NotFound):
        await store.jobs.get(old)


async def test_a_stream_that_resumes_after_a_removed_event_gets_a_gap(
    store: Store, blobs: BlobStore, redis: Any
) -> None:
    job_id = await history(store, blobs)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    first = (await store.events.read(job_id))[1].id
    await redis.xtrim(keys.events(job_id), maxlen=3, approximate=False)
    events = await store.events.read(job_id)
    gap, *rest = await store.events.read(job_id, first)
    assert (gap.type, gap.data["after"], gap.data["before"]) == ("gap", first, events[0].id)
    assert "no longer kept" in gap.data["reason"]
    assert rest == events
    assert await store.events.read(job_id, gap.id) == events
    assert await store.events.read(job_id, first, 1) == [gap]
    assert await store.events.read(job_id, events[0].id) == events[1:]


async def test_an_id_of_before_the_first_event_is_no_gap(store: Store) -> None:
    job_id = (await store.jobs.create(spec()))[0].id
    assert [event.type for event in await store.events.read(job_id, "0-0")] == ["status"]


async def test_what_a_failed_job_only_needed_while_it_ran_goes(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock
) -> None:
    job_id = await history(store, blobs)
    working = [keys.job_key(job_id, part) for part in ("state", "ledger", "held")]
    working += [keys.job_key(job_id, part, step) for part in ("refs", "train") for step in (0, 7)]
    for name in (*working, keys.trajectories(job_id), keys.dead_trajectories(job_id)):
        await redis.set(name, b"x")
    await store.jobs.set_status(job_id, JobStatus.FAILED, "controller error")
    await Keeper(store, blobs, Keep(), clock=clock).look()
    assert not await redis.exists(*working, keys.trajectories(job_id))
    assert await redis.exists(keys.dead_trajectories(job_id))
    assert len(await store.history.metrics(job_id)) == 3


async def test_an_ended_job_is_archived_before_it_goes(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path
) -> None:
    job_id = await history(store, blobs, key="key")
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    events, metrics = await store.events.read(job_id), await store.history.metrics(job_id)
    file = tmp_path / "file"
    file.write_text("not a folder")
    registry = CollectorRegistry()
    failing = Keeper(store, blobs, Keep(jobs=0), Archive(f"{file}/archive"), registry=registry, clock=clock)
    for looks in (1, 2):
        await failing.look()
        assert (await store.jobs.get(job_id)).status == JobStatus.SUCCEEDED  # it waits for its archive
        assert registry.get_sample_value("flowfleet_controller_archive_failures_total") == looks

    archive = Archive(f"file://{tmp_path}/archive")
    with pytest.raises(NotFound, match="no complete archive"):
        archive.job(job_id)
    await Keeper(store, blobs, Keep(jobs=0), archive, clock=clock).look()
    with pytest.raises(Gone, match=f"its archive is {archive.folder(job_id)}"):
        await store.jobs.get(job_id)
    assert [job.id for job in archive.jobs()] == [job_id]
    assert archive.job(job_id).archive == archive.folder(job_id)
    assert [event.id for event in archive.events(job_id)] == [event.id for event in events]
    assert [row.values for row in archive.metrics(job_id)] == [row.values for row in metrics]
    found = list(archive.samples(job_id))
    assert [(sample.step, sample.reward) for sample in found] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [archive.media(job_id, sample) for sample in found] == [f"picture {step}".encode() for step in range(3)]
    counts = json.loads((tmp_path / "archive" / job_id / "complete.json").read_text())
    assert (counts["events"], counts["metrics"], counts["samples"], counts["media"]) == (6, 3, 3, 3)


async def test_ended_jobs_go_before_they_fill_a_small_redis(store: Store, blobs: BlobStore, clock: Clock) -> None:
    """The default of 16 GiB is more than many a Redis has: the half of what submits may fill counts."""
    first, second = [await history(store, blobs) for _ in range(2)]
    for job_id in (first, second):
        clock.now += 1
        await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    size = await store.removal.history_bytes(first)
    redis = AsyncMock()
    redis.info.return_value = {"used_memory": 0, "maxmemory": int(1.5 * size / 0.4)}
    await Keeper(store, blobs, Keep(), memory=Memory(redis, Keep()), clock=clock).look()
    with pytest.raises(NotFound):
        await store.jobs.get(first)
    assert (await store.jobs.get(second)).status == JobStatus.SUCCEEDED
    assert Keep(gib=1).within(100 * GIB).gib == 1


async def test_votes_count_as_history_and_go_with_their_job(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock
) -> None:
    job_id = await history(store, blobs)
    before = await store.removal.history_bytes(job_id)
    for group in range(50):
        asked = Asked(prompt="a sign", samples=[VoteSample(index=0), VoteSample(index=1)], wanted=1 + group % 2)
        await store.votes.ask(job_id, 0, group, asked)
        await store.votes.vote(
            job_id, Ballot(step=0, group=group, left=0, right=1, choice="tie", id=f"{group:08}", voter="ann")
        )
    names = [name async for name in redis.scan_iter(match=keys.job_key(job_id, "votes") + "*")]
    assert len(names) == 2 + 50  # groups that wait, those that are complete, and the votes of each
    taken = sum([await redis.memory_usage(name, samples=0) for name in names])
    assert await store.removal.history_bytes(job_id) - before == pytest.approx(taken, rel=0.1)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    await Keeper(store, blobs, Keep(jobs=0), clock=clock).look()
    assert not await redis.exists(*names)


async def test_pictures_in_a_store_of_before_stop_nothing(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock, tmp_path: Path
) -> None:
    """An operator moved the blobs out of Redis: what old jobs name there is not this store's."""
    job_id = await history(store, blobs)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    moved = open_blobs(redis, f"file://{tmp_path}/blobs")
    archive = Archive(f"file://{tmp_path}/archive")
    await Keeper(store, moved, Keep(jobs=0), archive, blobs_in_redis=False, clock=clock).look()
    assert len(list(archive.samples(job_id))) == 3
    with pytest.raises(NotFound):
        await store.jobs.get(job_id)


class PoisonedArchive(Archive):
    """Fails for one job with an error that is not an OSError, as clients of object stores do."""

    poison = ""

    def write(self, job_id: str, name: str, data: bytes) -> None:
        if job_id == self.poison:
            raise RuntimeError("NoCredentials")
        super().write(job_id, name, data)


async def test_a_job_that_cannot_be_archived_stops_no_other(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = PoisonedArchive(f"file://{tmp_path}/archive")
    archive.poison = stuck = await history(store, blobs)
    await store.jobs.set_status(stuck, JobStatus.SUCCEEDED)
    clock.now += 1
    other = await history(store, blobs)
    await store.jobs.set_status(other, JobStatus.SUCCEEDED)
    await redis.set(keys.job_key(stuck, "ledger"), b"x")
    await Keeper(store, blobs, Keep(jobs=0), archive, clock=clock).look()
    assert "RuntimeError: NoCredentials" in caplog.text
    assert (await store.jobs.get(stuck)).status == JobStatus.SUCCEEDED
    assert [job.id for job in archive.jobs()] == [other]
    with pytest.raises(NotFound):
        await store.jobs.get(other)
    assert not await redis.exists(keys.job_key(stuck, "ledger"))


async def test_only_the_leader_removes(store: Store, blobs: BlobStore, redis: Any, clock: Clock) -> None:
    job_id = await history(store, blobs)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    await redis.set(keys.leader_term(), b"of another")
    before = await all_keys(redis)
    clock.now += DAY_S
    with pytest.raises(LeaseLost):
        await Keeper(store.fenced_by(Lease(redis)), blobs, Keep(jobs=0), clock=clock).look()
    assert await all_keys(redis) == before


async def test_a_controller_that_dies_in_between_is_continued(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock
) -> None:
    before = await all_keys(redis)
    job_id = await history(store, blobs)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    await store.removal.remove(job_id, "was deleted")  # and nothing after that
    await Keeper(store, blobs, Keep(), clock=clock).look()
    left = {name.encode() for name in (keys.leftovers(), keys.notices(), keys.removed())}
    assert await all_keys(redis) - before == left


async def test_a_job_that_ends_during_a_look_is_read_by_the_next(
    store: Store, blobs: BlobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await history(store, blobs) for _ in range(2)]
    keeper = Keeper(store, blobs, Keep(jobs=0), clock=clock)
    await keeper.look()
    await store.jobs.set_status(first, JobStatus.SUCCEEDED)
    measure = store.removal.history_bytes

    async def ends_meanwhile(job_id: str) -> int:
        await store.jobs.set_status(second, JobStatus.SUCCEEDED)
        return await measure(job_id)

    monkeypatch.setattr(store.removal, "history_bytes", ends_meanwhile)
    for _ in range(2):
        await keeper.look()
    assert await store.removal.ended() == []


async def test_what_only_a_running_job_needs_goes_from_a_store_of_files(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    """Each kind of blob by the name under which rollouts, trainer and controller write it."""
    job_id = (await store.jobs.create(spec(), None))[0].id
    await store.jobs.set_status(job_id, JobStatus.RUNNING)
    files = open_blobs(connect("redis://127.0.0.1:1"), f"file://{tmp_path}/blobs", CollectorRegistry())
    working = ("trajectory", "embeds", "negative", "condition", "adapter", "evaluated")
    refs = {kind: await files.put(keys.blob(job_id, kind, 0), b"data") for kind in (*working, "media", "given")}
    await store.jobs.set_status(job_id, JobStatus.FAILED)
    await Keeper(store, files, Keep(), clock=clock, blobs_in_redis=False).look()
    for kind in working:
        with pytest.raises(NotFound):
            await files.get(refs[kind])
    for kind in ("media", "given"):
        assert await files.get(refs[kind]) == b"data"


async def test_a_record_that_cannot_be_read_stops_no_removal(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock
) -> None:
    jobs = [await history(store, blobs) for _ in range(3)]
    for job_id in jobs:
        await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    await redis.hset(keys.job(jobs[0]), mapping={"ended_at": "yesterday", "spec": "no JSON", "format": "9"})
    await store.jobs.request(jobs[1], "delete")
    keeper = Keeper(store, blobs, Keep(days=1), clock=clock)
    await keeper.look()
    assert [await store.removal.exists(job_id) for job_id in jobs] == [True, False, True]
    await store.jobs.request(jobs[0], "delete")
    await keeper.look()
    assert not await store.removal.exists(jobs[0])
