"""How many replicas are wanted, by rules that hold for every state of a job, and the hash that tells it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.job.spec import JobSpec, RewardPart, parse_job
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.job.machine import events as ev
from services.controller.job.machine.state_machine import Machine
from services.controller.rewards.scoring import MAX_SCORING
from services.controller.scaling.demand import (
    FRESH_S,
    REWARD_SAMPLES,
    Demand,
    DemandHash,
    Work,
    at_least,
    demand,
    work_of,
)
from services.controller.store.leadership import Lease
from services.controller.store.records import JobRecord


def spec_of(**rollout: Any) -> JobSpec:
    part = {"prompts_per_step": 4, "group_size": 6, "batch_size": 12} | rollout
    data = {"train": "t.txt", "validation": "v.txt"}
    return parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": data, "rollout": part})


def record_of(
    spec: JobSpec, status: JobStatus = JobStatus.RUNNING, desired: Desired = Desired.RUNNING, job_id: str = "job"
) -> JobRecord:
    now = datetime.now(UTC)
    return JobRecord(
        id=job_id, name="n", status=status, desired=desired, created_at=now, spec=spec.model_dump(mode="json")
    )


def started(spec: JobSpec) -> Machine:
    """A job whose first version is published and validated: all samples of its first step are wanted."""
    machine = Machine(spec)
    for event in (ev.TrainerReady(version=0), ev.Published(version=0), ev.Validated(version=0, reward=0.5)):
        machine.apply(event)
    return machine


def asked_of(machine: Machine, num_held_out: int = 0, in_flight: int = 0) -> dict[Any, Demand]:
    work = work_of(record_of(machine.spec), machine, num_held_out)
    return demand([work] if work else [], {"default": in_flight})


def test_a_job_counts_from_its_admission_and_no_longer_than_it_wants_to_run() -> None:
    spec = spec_of()
    for status in JobStatus:
        for desired in Desired:
            work = work_of(record_of(spec, status, desired))
            assert (work is not None) == (not status.terminal and desired is Desired.RUNNING)
    assert demand([work for work in [work_of(record_of(spec, JobStatus.QUEUED))] if work], {}) == {
        ("rollout", "default"): Demand(replicas=1, jobs=("job",)),
        ("reward", "ocr"): Demand(replicas=1, jobs=("job",)),
    }


def test_a_trainer_that_makes_all_samples_needs_no_rollout() -> None:
    spec = parse_job(spec_of().model_dump(mode="json") | {"trainer": {"samples": "only"}})
    assert set(at_least([record_of(spec)])) == {("reward", "ocr")}
    assert set(asked_of(started(spec))) == {("reward", "ocr")}


def test_jobs_of_a_pool_take_turns_at_the_replicas_that_the_largest_wants() -> None:
    queued, running = JobStatus.QUEUED, JobStatus.RUNNING
    kinds = [("default", queued), ("default", running), ("wide", running), ("default", running)]
    jobs = [record_of(spec_of(pool=pool), status, job_id=f"job-{i}") for i, (pool, status) in enumerate(kinds)]
    found = at_least(jobs)
    assert {name: entry.jobs for name, entry in found.items()} == {
        ("rollout", "default"): ("job-1", "job-3"),
        ("rollout", "wide"): ("job-2",),
        ("reward", "ocr"): ("job-1", "job-2", "job-3"),
    }
    jobs[1] = record_of(spec_of(), JobStatus.PAUSED, Desired.PAUSED, "job-1")
    assert at_least(jobs)["rollout", "default"].jobs == ("job-3",)
    small, large = started(spec_of(prompts_per_step=4)), started(spec_of(prompts_per_step=16))
    works = [work_of(record_of(one.spec, job_id=name), one) for name, one in (("s", small), ("l", large))]
    wanted = demand([work for work in works if work], {"default": 30})["rollout", "default"]
    assert wanted == Demand(replicas=math.ceil(16 * 6 / (2 * 12)), waiting=20 * 6 - 30, in_flight=30, jobs=("l", "s"))


def test_replicas_follow_the_samples_that_are_wanted_through_a_step() -> None:
    spec = spec_of(prompts_per_step=16)
    machine = started(spec)
    assert asked_of(machine, in_flight=30)["rollout", "default"] == Demand(
        replicas=math.ceil(16 * 6 / (2 * 12)), waiting=16 * 6 - 30, in_flight=30, jobs=("job",)
    )
    for group in range(16):
        machine.apply(ev.Sampled(step=0, group=group, index=0, version=0))
    assert asked_of(machine)["rollout", "default"].replicas == math.ceil(16 * 5 / (2 * 12))
    assert asked_of(machine)["reward", "ocr"].in_flight == 16
    for group in range(16):
        for index in range(1, 6):
            machine.apply(ev.Sampled(step=0, group=group, index=index, version=0))
    assert asked_of(machine)["rollout", "default"].replicas == 1  # it trains, and then publishes to somebody
    assert asked_of(machine)["reward", "ocr"].replicas == math.ceil(16 * 6 / REWARD_SAMPLES)


def test_held_out_prompts_are_work_while_they_are_validated() -> None:
    machine = Machine(spec_of())
    machine.apply(ev.TrainerReady(version=0))
    before = asked_of(machine, 1000)["rollout", "default"]
    machine.apply(ev.Published(version=0))
    during = asked_of(machine, 1000)["rollout", "default"]
    machine.apply(ev.Validated(version=0, reward=0.5))
    after = asked_of(machine, 1000)["rollout", "default"]
    assert [one.replicas for one in (before, during, after)] == [1, math.ceil(1024 / 24), 1]
    assert (during.waiting, after.waiting) == (1024, 24)


def test_every_sample_of_a_held_out_prompt_is_work() -> None:
    spec = spec_of()
    several = spec.schedule.model_copy(update={"validation_samples": 5})
    machine = Machine(spec.model_copy(update={"schedule": several}))
    for event in (ev.TrainerReady(version=0), ev.Published(version=0)):
        machine.apply(event)
    work = work_of(record_of(machine.spec), machine, 7)
    batches = math.ceil(7 / (spec.rollout.batch_size // 5))
    groups = math.ceil(spec.rollout.prompts_per_step / (spec.rollout.batch_size // spec.rollout.group_size))
    assert work is not None
    assert (work.samples, work.requests) == (spec.samples_per_step + 35, groups + batches)


def test_a_reward_of_held_out_samples_needs_no_replicas_for_others() -> None:
    spec = spec_of(prompts_per_step=16)
    rewards = {"ocr": RewardPart(), "judge": RewardPart(weight=0, held_out_only=True)}
    watching = spec.model_copy(update={"rewards": rewards})
    work = work_of(record_of(watching), started(watching), 7)
    assert work is not None
    assert (work.rewards, work.spared) == (("judge", "ocr"), {"judge"})
    found = demand([replace(work, unscored=REWARD_SAMPLES * 3, held_out=0)], {})
    assert (found["reward", "ocr"].replicas, found["reward", "judge"].replicas) == (3, 1)
    found = demand([replace(work, unscored=REWARD_SAMPLES * 3, held_out=REWARD_SAMPLES * 2)], {})
    assert found["reward", "judge"].replicas == 2


def test_a_lost_trainer_does_not_take_the_replicas_away() -> None:
    machine = started(spec_of(prompts_per_step=16))
    before = asked_of(machine)
    machine.apply(ev.TrainerLost())
    machine.apply(ev.TrainerReady(version=0))
    assert asked_of(machine) == before


def test_no_more_replicas_than_there_are_requests() -> None:
    """A group that is larger than a replica's share still goes to one replica."""
    machine = started(spec_of(prompts_per_step=2, group_size=64, batch_size=4))
    assert asked_of(machine)["rollout", "default"].replicas == 2


counts = st.integers(0, 5000)
works = st.builds(
    Work,
    job_id=st.sampled_from(["a", "b", "c"]),
    pool=st.sampled_from(["default", "wide"]),
    rewards=st.sampled_from([("ocr",), ("ocr", "jpeg")]),
    samples=counts,
    requests=counts,
    samples_per_replica=st.integers(1, 500),
    unscored=counts,
)


@given(st.lists(works, max_size=4, unique_by=lambda work: work.job_id), st.integers(0, 100))
def test_never_none_with_work_and_never_more_than_can_be_used(jobs: list[Work], out: int) -> None:
    found = demand(jobs, {"default": out, "wide": out})
    assert {name for component, name in found if component == "rollout"} == {work.pool for work in jobs}
    assert all(one.replicas >= 1 and one.waiting >= 0 and one.in_flight >= 0 for one in found.values())
    for work in jobs:
        pool = found["rollout", work.pool]
        users_of = [other for other in jobs if other.pool == work.pool]
        assert pool.jobs == tuple(sorted(other.job_id for other in users_of))
        assert pool.replicas <= max(1, *(other.requests for other in users_of))
        assert pool.waiting + pool.in_flight == sum(other.samples for other in users_of)
        for name in work.rewards:
            users = sum(name in other.rewards for other in jobs)
            assert found["reward", name].replicas <= max(1, math.ceil(users * MAX_SCORING / REWARD_SAMPLES))


@given(works, counts, counts)
def test_more_work_never_wants_fewer_replicas(work: Work, samples: int, unscored: int) -> None:
    more = Work(**{**vars(work), "samples": work.samples + samples, "unscored": work.unscored + unscored})
    less_found, more_found = demand([work], {}), demand([more], {})
    assert all(more_found[name].replicas >= less_found[name].replicas for name in less_found)


@settings(max_examples=50)
@given(st.data())
def test_through_any_history_there_is_a_replica_while_the_job_runs(data: st.DataObject) -> None:
    machine = Machine(spec_of())
    event = st.one_of(
        st.just(ev.TrainerReady(version=0)),
        st.just(ev.TrainerLost()),
        st.just(ev.Published(version=0)),
        st.just(ev.ReplicaBehind()),
        st.builds(ev.Sampled, step=st.just(0), group=st.integers(0, 3), index=st.integers(0, 5), version=st.just(0)),
        st.builds(ev.Dropped, step=st.just(0), group=st.integers(0, 3), index=st.integers(0, 5), reason=st.just("r")),
        st.just(ev.Failed(reason="f")),
    )
    for happened in data.draw(st.lists(event, max_size=60)):
        machine.apply(happened)
        found = asked_of(machine, num_held_out=16)
        if machine.finished:
            assert found == {}
            continue
        wanted = sum(batch.count("wanted") for batch in machine.state.batches.values())
        pool = found["rollout", "default"]
        assert pool.replicas >= 1
        assert pool.waiting >= wanted
        assert found["reward", "ocr"].replicas >= 1


async def test_the_hash_is_what_the_leader_wrote_last_and_says_whether_one_writes(redis_url: str) -> None:
    redis = connect(redis_url)
    lease, told = Lease(redis), DemandHash(redis)
    await lease._take()
    assert await told.read() == ({}, False)
    first = {("rollout", "default"): Demand(replicas=3, waiting=9, in_flight=4, jobs=("j",))}
    await told.write(lease, first)  # type: ignore[arg-type]
    assert await told.read() == (first, True)
    await told.write(lease, {("reward", "a.b-c"): Demand(replicas=1)})
    assert await told.read() == ({("reward", "a.b-c"): Demand(replicas=1)}, True)
    seconds, _ = await redis.time()
    await redis.hset(keys.demand(), "updated", seconds - int(FRESH_S) - 2)
    assert await told.read() == ({("reward", "a.b-c"): Demand(replicas=1)}, False)
    await redis.aclose()
