"""Sweeps over REST: all of their jobs or none, and none twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.api.overview import Curve
from flowfleet.redis import keys
from services.controller.store.jobs import Jobs
from tests.services.controller.conftest import Api

Job = Callable[..., dict[str, Any]]
ROWS = [{"trainer.optimizer.lr": lr, "seed": seed} for lr in (1e-5, 1e-4) for seed in (0, 1)]


async def post(api: Api, job: dict[str, Any], rows: list[dict[str, Any]] = ROWS, **parts: Any) -> httpx.Response:
    return await api.client.post("/v1/sweeps", json={"name": "lr", "job": job, "settings": rows, **parts})


async def queued(api: Api) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await api.client.get("/v1/overview", params={"sweep": "lr"})).json()["items"]
    return items[::-1]


async def test_a_sweep_is_a_job_for_each_row_in_order(api: Api, job: Job) -> None:
    await api.submit(job())
    answer = await post(api, job(), at_once=2)
    assert answer.status_code == 202, answer.text
    assert [one["sweep"] for one in answer.json()] == [{"name": "lr", "settings": row, "at_once": 2} for row in ROWS]
    assert [one["spec"]["seed"] for one in answer.json()] == [0, 1, 0, 1]
    assert [(one["id"], one["sweep"]) for one in await queued(api)] == [
        (one["id"], one["sweep"]) for one in answer.json()
    ]
    listed = (await api.client.get("/v1/jobs")).json()["items"]
    assert [one["sweep"] and one["sweep"]["settings"] for one in listed] == [*reversed(ROWS), None]
    shown = (await api.client.get(f"/v1/jobs/{listed[0]['id']}")).json()
    assert shown["sweep"] == listed[0]["sweep"]


async def test_a_sweep_that_broke_off_is_completed_and_no_job_doubled(
    api: Api, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = Jobs.create, []

    async def failing(*args: Any, **parts: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("the controller dies")
        return await create(*args, **parts)

    with monkeypatch.context() as patched:
        patched.setattr(Jobs, "create", failing)
        assert (await post(api, job())).status_code == 500
    assert len(first := await queued(api)) == 2
    again = await post(api, job())
    assert again.status_code == 202, again.text
    assert [one["sweep"]["settings"] for one in again.json()] == ROWS
    assert [one["id"] for one in again.json()[:2]] == [one["id"] for one in first]
    assert [one["id"] for one in (await post(api, job())).json()] == [one["id"] for one in await queued(api)]
    more = await post(api, job(), [*ROWS, {"trainer.optimizer.lr": 1e-4, "seed": 2}])
    assert len(more.json()) == len(await queued(api)) == 5


@pytest.mark.parametrize(
    ("rows", "parts", "setting", "words"),
    [
        ([{"sede": 0}, {"sede": 1}], {}, "sede", "did you mean seed? (sede=0; sede=1)"),
        (
            [*ROWS, {"trainer.optimizer.lr": 2.0, "seed": 0}],
            {},
            "trainer.optimizer.lr",
            "(trainer.optimizer.lr=2.0 seed=0)",
        ),
        ([{"model.path": "/no"}, {"seed": 1}], {}, "model.path", "(model.path=/no)"),
        ([{"rewards.x": {}}, {"seed": 1}], {}, "rewards.x", "it has: jpeg, ocr"),
        ([{"seed": seed} for seed in range(501)], {}, "settings", "at most 500"),
        ([], {}, "settings", "at least 1"),
        (ROWS, {"name": "No Spaces!"}, "name", "give up to 63 lowercase letters"),
        (ROWS, {"at_once": 0}, "at_once", "greater than or equal to 1"),
        (ROWS, {"at_once": "2"}, "at_once", "not a whole number"),
        (ROWS, {"atonce": 2}, "atonce", "not permitted"),
        ([{"seed.x": 1}, {"seed.x": 2}], {}, "seed", ""),
    ],
)
async def test_where_one_job_cannot_run_none_is_queued(
    api: Api, job: Job, rows: list[dict[str, Any]], parts: dict[str, Any], setting: str, words: str
) -> None:
    answer = await post(api, job(), rows, **parts)
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["detail"].startswith("no job of the sweep was queued: 1 setting")
    (error,) = problem["errors"]
    assert error["setting"] == setting
    assert words in error["detail"]
    assert (await api.client.get("/v1/jobs")).json()["items"] == []


async def test_a_name_belongs_to_one_sweep(api: Api, job: Job) -> None:
    assert (await post(api, job())).status_code == 202
    for other in (
        await post(api, job(seed=7), [{"schedule.steps": 3, **row} for row in ROWS]),
        await post(api, job(), at_once=1),
    ):
        assert other.status_code == 409
        assert "lr is another one: give another name" in other.json()["detail"]
    assert len(await queued(api)) == 4


async def test_the_record_survives_as_the_job_goes_on(api: Api, job: Job) -> None:
    (first, *_) = (await post(api, job())).json()
    await api.store.jobs.set_status(first["id"], JobStatus.RUNNING)
    await api.store.jobs.update_progress(first["id"], held_out_reward=0.25, held_out_best=0.5)
    (record,) = [one for one in await api.store.jobs.unended() if one.id == first["id"]]
    assert record.sweep is not None
    assert record.sweep.settings == ROWS[0]
    assert (await queued(api))[0]["progress"]["held_out_best"] == 0.5


async def test_200_jobs_of_a_sweep_are_listed_in_half_a_second(api: Api, job: Job) -> None:
    """Measures the process's own time, because the machine may have other work."""
    rows = [{"trainer.optimizer.lr": lr * 1e-6, "seed": seed} for lr in range(1, 41) for seed in range(5)]
    jobs = (await post(api, job(), rows)).json()
    curve = Curve(stride=1, values=tuple(0.01 * step for step in range(60))).model_dump_json()
    async with api.store.link.redis.pipeline() as pipe:
        for one in jobs:
            pipe.hset(keys.job(one["id"]), "curve", curve)
        await pipe.execute()
    for path, more in (("/v1/jobs", {}), ("/v1/overview", {}), ("/v1/overview", {"sweep": "lr"})):
        began = time.process_time()
        items = (await api.client.get(path, params={"limit": 200, **more})).json()["items"]
        assert len(items) == len(rows)
        assert time.process_time() - began < 0.5
