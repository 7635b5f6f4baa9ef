"""What a controller admits: samples of a step, samples open at once, and settings that make sense."""

from __future__ import annotations

from typing import Any

import pytest

from flowfleet.errors import Full
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.redis.client import connect
from services.controller.jobs.submission.checks import check
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.limits import Limits
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places
from services.controller.store.store import Store


def job(pool: str = "default", **parts: Any) -> JobSpec:
    """A job of 6 groups of 4, unless its parts say otherwise."""
    rollout = {"pool": pool, "prompts_per_step": 6, "group_size": 4, **parts.pop("rollout", {})}
    base = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
    return parse_job({**base, "rollout": rollout, **parts})


def test_a_job_with_too_many_samples_is_refused_by_the_settings_to_change() -> None:
    limits = Limits(samples_per_step=24, open_samples=48)
    assert limits.problem(job(schedule={"max_staleness": 1})) == ""
    assert limits.problem(job(rollout={"group_size": 5})).startswith(
        "rollout.prompts_per_step x rollout.group_size = 6 x 5 = 30 samples a step, and this controller admits 24: "
    )
    problem = limits.problem(job(schedule={"max_staleness": 2}))
    assert problem.startswith("schedule.max_staleness = 2 keeps 3 steps of 24 samples open, 72 in all, and this")
    assert problem.endswith("raise --limit open_samples")


async def test_the_check_of_a_submit_knows_the_limits() -> None:
    with pytest.raises(InvalidJob) as refused:
        await check(job(), StaticDirectory({"ocr": "x:1"}), Sources(Places()), Limits(samples_per_step=23))
    assert refused.value.problems[0].startswith("rollout.prompts_per_step x ")


async def test_pools_share_the_limit_and_jobs_of_one_pool_do_not_add_up(redis_url: str) -> None:
    redis = connect(redis_url)
    limits, store = Limits(open_samples=60), Store(redis)
    for pool, prompts in (("a", 4), ("a", 9), ("b", 4)):  # 36 in a, 16 in b
        await store.jobs.create(job(pool, rollout={"prompts_per_step": prompts}))
    waiting = await store.jobs.unended()
    limits.check_room(job("a", rollout={"prompts_per_step": 11}), waiting)
    limits.check_room(job("c", rollout={"prompts_per_step": 2}), waiting)
    with pytest.raises(Full, match=r"would have 64 samples open at once, 12 of them this job's, .* admits 60: wait"):
        limits.check_room(job("c", rollout={"prompts_per_step": 3}), waiting)
    await store.jobs.set_status(waiting[1].id, "failed")
    limits.check_room(job("c", rollout={"prompts_per_step": 3}), await store.jobs.unended())
    await redis.aclose()


@pytest.mark.anyio
async def test_the_data_of_all_pools_have_one_budget(redis_url: str) -> None:
    """The largest of a pool counts: its jobs run one after the other."""
    redis = connect(redis_url)
    limits, store = Limits(data_bytes=100), Store(redis)
    for data_bytes in (40, 50):
        await store.jobs.create(job("a"), data_bytes=data_bytes)
    waiting = await store.jobs.unended()
    limits.check_room(job("b"), waiting, 50)
    limits.check_room(job("a"), waiting, 100)
    with pytest.raises(Full, match=r"would take 101 bytes, 51 of them this job's.*--limit data_bytes"):
        limits.check_room(job("b"), waiting, 51)
    await redis.aclose()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"timeouts": {"score_s": float("nan")}}, r"timeouts.score_s: .*finite"),
        ({"timeouts": {"generate_s": float("inf")}}, r"timeouts.generate_s: .*finite"),
        ({"timeouts": {"publish_s": -1.0}}, r"timeouts.publish_s: .*greater than or equal to 0.1"),
        ({"timeouts": {"train_step_s": 1e-9}}, r"timeouts.train_step_s: .*greater than or equal to 0.1"),
        ({"timeouts": {"checkpoint_s": 1e300}}, r"timeouts.checkpoint_s: .*less than or equal to 604800"),
        ({"rewards": {"ocr": {"weight": float("nan")}}}, r"rewards.ocr.weight: .*finite"),
        ({"rewards": {"ocr": {"weight": 1e308}}}, r"rewards.ocr.weight: .*less than or equal to 1000000"),
        ({"rewards": {"ocr": {"weight": -1e-12}}}, r"rewards.ocr.weight: -1e-12 is too small to count: give 0, or"),
        ({"rewards": {"ocr": {"curve": [[0, float("inf")]]}}}, r"rewards.ocr.curve.0.1: .*finite"),
        ({"rewards": {"ocr": {"curve": [[0, 1e-9]]}}}, r"rewards.ocr.curve.0.1: 1e-09 is too small"),
        ({"rewards": {"ocr": {"weight": 0.0}}}, r"rewards.\*.weight is 0 throughout"),
    ],
)
def test_timeouts_and_weights_that_make_no_sense_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**parts)


async def test_trainers_are_limited_too_for_each_pool_starts_one(redis_url: str) -> None:
    redis = connect(redis_url)
    limits, store = Limits(ranks=4), Store(redis)
    assert limits.problem(job(trainer={"world_size": 5})).startswith("trainer.world_size = 5: this controller admits 4")
    for pool, ranks in (("a", 1), ("a", 2), ("b", 1)):
        await store.jobs.create(job(pool, trainer={"world_size": ranks}))
    waiting = await store.jobs.unended()
    limits.check_room(job("invented"), waiting)
    limits.check_room(job("b", trainer={"world_size": 2}), waiting)
    with pytest.raises(Full, match="the fleet's trainers would have 5 ranks, 2 of them this job's, and this"):
        limits.check_room(job("invented", trainer={"world_size": 2}), waiting)
    await redis.aclose()
