"""Listing of samples: pages, filters and order, against a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfleet.errors import NotFound
from flowfleet.redis.client import connect
from services.controller.store import samples as shelf
from services.controller.store.credits import Trained
from services.controller.store.records import Order, SampleRecord, new_job_id
from services.controller.store.store import Store

JOB = new_job_id()
REWARDS = {(0, 0): 0.5, (0, 1): 0.1, (1, 0): 0.9, (1, 1): None, (2, 0): -1.0, (2, 1): 0.7}


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    client = connect(redis_url)
    yield Store(client)
    await client.aclose()


async def fill(store: Store) -> None:
    records = [
        SampleRecord(step=step, group=0, index=index, prompt=f"p{step}", reward=reward)
        for (step, index), reward in REWARDS.items()
    ]
    await store.samples.put(JOB, *records)


async def walk(store: Store, order: Order, step: int | None = None) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    cursor = None
    while True:
        page, cursor = await store.samples.page(JOB, order=order, step=step, cursor=cursor, limit=2)
        seen += [(sample.step, sample.index) for sample in page]
        if cursor is None:
            return seen


async def test_orders(store: Store) -> None:
    await fill(store)
    scored = {place: reward for place, reward in REWARDS.items() if reward is not None}
    assert await walk(store, "oldest") == sorted(REWARDS)
    assert await walk(store, "newest") == sorted(REWARDS, reverse=True)
    assert await walk(store, "best") == sorted(scored, key=lambda place: -scored[place])
    assert await walk(store, "worst") == sorted(scored, key=lambda place: scored[place])


async def test_one_step(store: Store) -> None:
    await fill(store)
    await store.samples.put(JOB, SampleRecord(step=10, group=0, index=0, prompt="p", reward=1.0))
    assert await walk(store, "newest", step=1) == [(1, 1), (1, 0)]
    assert await walk(store, "best", step=0) == [(0, 0), (0, 1)]
    assert await walk(store, "worst", step=1) == [(1, 0)]
    assert await walk(store, "best", step=7) == []


async def test_purposes_do_not_mix_and_a_record_is_replaced(store: Store) -> None:
    one = SampleRecord(step=0, group=3, index=1, prompt="a", reward=0.25, scores={"ocr": float("nan")})
    held_out = one.model_copy(update={"purpose": "validate", "prompt": "b"})
    await store.samples.put(JOB, one, held_out, one.model_copy(update={"reward": 0.75}))
    found = await store.samples.get(JOB, 0, 3, 1)
    assert (found.prompt, found.reward, found.scores) == ("a", 0.75, {"ocr": None})
    assert (await store.samples.get(JOB, 0, 3, 1, "validate")).prompt == "b"
    assert len((await store.samples.page(JOB, purpose="validate"))[0]) == 1
    await store.samples.put(JOB, one.model_copy(update={"reward": None, "drop_reason": "unscored"}))
    assert await walk(store, "best") == []
    with pytest.raises(NotFound, match="0/3/2"):
        await store.samples.get(JOB, 0, 3, 2)


async def test_the_oldest_go_beyond_the_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MAX_SAMPLES", 4)
    await fill(store)
    assert await walk(store, "oldest") == sorted(REWARDS)[-4:]
    assert await walk(store, "best") == [(1, 0), (2, 1), (2, 0)]


@pytest.mark.parametrize("order", ["best", "newest"])
async def test_a_foreign_cursor_is_refused(store: Store, order: Order) -> None:
    with pytest.raises(ValueError, match="cursor"):
        await store.samples.page(JOB, order=order, cursor="zzz")
    with pytest.raises(ValueError, match="cursor"):
        await store.samples.page(JOB, order="oldest", step=3, cursor="0000000004/00000/00000")


async def test_a_range_of_groups_of_a_step(store: Store) -> None:
    await store.samples.put(
        JOB, *(SampleRecord(step=4, group=g, index=i, prompt="p") for g in range(12) for i in (0, 1))
    )
    await store.samples.put(JOB, SampleRecord(step=5, group=2, index=0, prompt="p"))
    page, following = await store.samples.page(JOB, step=4, groups=(2, 5), order="oldest", limit=4)
    assert [(one.group, one.index) for one in page] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    page, following = await store.samples.page(JOB, step=4, groups=(2, 5), order="oldest", limit=4, cursor=following)
    assert ([(one.group, one.index) for one in page], following) == ([(4, 0), (4, 1)], None)
    for wrong in ({"groups": (2, 5)}, {"groups": (2, 5), "step": 4, "order": "best"}, {"by": "ocr"}):
        with pytest.raises(ValueError, match="give a step"):
            await store.samples.page(JOB, **wrong)


@pytest.mark.parametrize("order", ["newest", "oldest"])
async def test_one_sample_a_group_on_any_page(store: Store, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "PAGE", 3)  # groups are larger than what is read at once
    places = [(step, group, index) for step in (0, 1) for group in range(3) for index in range(5)]
    await store.samples.put(JOB, *(SampleRecord(step=s, group=g, index=i, prompt="p") for s, g, i in places))
    seen, cursor = [], None
    while True:
        page, cursor = await store.samples.page(JOB, order=order, one_a_group=True, cursor=cursor, limit=2)
        seen += [(one.step, one.group) for one in page]
        if cursor is None:
            break
    assert seen == sorted({(s, g) for s, g, _ in places}, reverse=order == "newest")
    page, _ = await store.samples.page(JOB, step=1, order=order, one_a_group=True)
    assert [one.group for one in page] == sorted(range(3), reverse=order == "newest")


async def test_a_step_by_one_reward(store: Store) -> None:
    scores = {0: {"ocr": 0.5, "a.b": 1.0}, 1: {"ocr": 0.9}, 2: {"other": 1.0}, 3: {"ocr": -1.0}}
    records = [
        SampleRecord(step=1, group=0, index=i, prompt="p", reward=1.0 - i, scores=dict(s)) for i, s in scores.items()
    ]
    await store.samples.put(JOB, *records)
    page, following = await store.samples.page(JOB, step=1, order="best", by="ocr", limit=2)
    assert ([one.index for one in page], following) == ([1, 0], "2")
    page, following = await store.samples.page(JOB, step=1, order="best", by="ocr", limit=2, cursor=following)
    assert ([one.index for one in page], following) == ([3], None)
    assert [one.index for one in (await store.samples.page(JOB, step=1, order="worst", by="ocr"))[0]] == [3, 0, 1]
    assert [one.index for one in (await store.samples.page(JOB, step=1, order="best", by="a.b"))[0]] == [0]


async def test_what_samples_counted_for_is_kept_as_long_as_they_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "MAX_SAMPLES", 2)
    for step in range(3):
        await store.samples.put(JOB, SampleRecord(step=step, group=0, index=0, prompt="p"))
        await store.credits.put(JOB, step, [Trained(0, 0, 0.5 + step, 1.25), Trained(3, 7, -1.0, None)])
    assert await store.credits.of_step(JOB, 0) == {}
    assert await store.credits.of_step(JOB, 2) == {(0, 0): Trained(0, 0, 2.5, 1.25), (3, 7): Trained(3, 7, -1.0, None)}
    assert await store.credits.of_step(JOB, 9) == {}
