"""The REST surface against a real Redis: jobs, wishes, and what a job leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowfleet.api.fleet import RewardLoad
from flowfleet.api.jobs import Checkpoint
from flowfleet.api.rewards import JobRewards, RewardRevision
from flowfleet.redis import keys
from services.controller.settings import ControllerSettings
from services.controller.store.records import SampleRecord, from_epoch
from tests.services.controller.conftest import Api, IdleRunner, serve

Job = Callable[..., dict[str, Any]]


async def test_a_submitted_job_is_shown_and_listed(api: Api, job: Job) -> None:
    response = await api.client.post("/v1/jobs", json=job(name="signs"))
    assert response.status_code == 202
    record = response.json()
    assert response.headers["location"] == f"/v1/jobs/{record['id']}"
    assert (record["status"], record["name"], record["spec"]["rollout"]["group_size"]) == ("queued", "signs", 16)
    assert (await api.client.get(response.headers["location"])).json() == record
    in_list = {
        **record,
        "spec": {},
        "rewards": JobRewards(active=RewardRevision(number=0, rewards={})).model_dump(mode="json"),
    }
    assert (await api.client.get("/v1/jobs")).json() == {"items": [in_list], "next_cursor": None}
    runner = api.services.runner
    assert isinstance(runner, IdleRunner)
    assert runner.notified == 1


async def test_a_job_is_answered_with_its_warnings(api: Api, job: Job) -> None:
    usual = await api.client.post("/v1/jobs", json=job())
    assert usual.json()["warnings"] == []
    odd = (await api.client.post("/v1/jobs", json=job(trainer={"updates_per_step": 1}))).json()
    assert [warning.partition(" has ")[0] for warning in odd["warnings"]] == ["algorithm.clip_range"]
    assert (await api.client.get(f"/v1/jobs/{odd['id']}")).json()["warnings"] == odd["warnings"]


async def test_submit_is_idempotent_by_key(api: Api, job: Job) -> None:
    first = await api.submit(job(), **{"Idempotency-Key": "k"})
    assert await api.submit(job(seed=1), **{"Idempotency-Key": "k"}) == first  # 1 is the default: the same job
    response = await api.client.post("/v1/jobs", json=job(seed=2), headers={"Idempotency-Key": "k"})
    assert response.status_code == 409
    assert first["id"] in response.json()["detail"]
    other = await api.submit(job(), **{"Idempotency-Key": "l"})
    assert [item["id"] for item in (await api.client.get("/v1/jobs")).json()["items"]] == [other["id"], first["id"]]


async def test_pages_and_status_filter(api: Api, job: Job) -> None:
    ids = [(await api.submit(job()))["id"] for _ in range(3)]
    await api.store.jobs.set_status(ids[0], "failed", "why")
    first = (await api.client.get("/v1/jobs", params={"limit": 2})).json()
    rest = (await api.client.get("/v1/jobs", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [item["id"] for item in first["items"] + rest["items"]] == ids[::-1]
    assert rest["next_cursor"] is None
    failed = (await api.client.get("/v1/jobs", params={"status": "failed"})).json()["items"]
    assert [(item["id"], item["reason"]) for item in failed] == [(ids[0], "why")]


async def test_wishes(api: Api, job: Job) -> None:
    url = f"/v1/jobs/{(await api.submit(job()))['id']}"
    wishes = ["pause", "pause", "resume", "resume", "cancel", "cancel"]
    answers = [await api.client.post(f"{url}/{wish}") for wish in wishes]
    assert [answer.status_code for answer in answers] == [202] * 6
    desired = [answer.json()["desired"] for answer in answers]
    assert desired == ["paused", "paused", "running", "running", "cancelled", "cancelled"]
    assert (await api.client.post(f"{url}/resume")).status_code == 409
    await api.store.jobs.set_status(url.rsplit("/", 1)[1], "cancelled")
    assert [(await api.client.post(f"{url}/{wish}")).status_code for wish in ("cancel", "pause")] == [202, 409]


async def test_metrics_and_checkpoints(api: Api, job: Job) -> None:
    job_id = (await api.submit(job()))["id"]
    for step in range(3):
        await api.store.history.put_metrics(job_id, step, {"actor/loss": 0.5 * step})
    await api.store.history.add_checkpoint(job_id, Checkpoint(step=10, path="c/10", created_at=from_epoch(0)))
    url = f"/v1/jobs/{job_id}"
    first = (await api.client.get(f"{url}/metrics", params={"limit": 2})).json()
    rest = (await api.client.get(f"{url}/metrics", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert first["items"] + rest["items"] == [{"step": s, "values": {"actor/loss": 0.5 * s}} for s in range(3)]
    checkpoints = (await api.client.get(f"{url}/checkpoints")).json()["items"]
    assert [(item["step"], item["path"]) for item in checkpoints] == [(10, "c/10")]


async def test_samples_link_to_their_pictures(api: Api, job: Job) -> None:
    job_id = (await api.submit(job()))["id"]
    ref = await api.services.blobs.put(keys.blob(job_id, "media", 1), b"\x89PNG picture", ttl_s=60)
    sample = SampleRecord(step=1, group=0, index=2, prompt="a sign", reward=0.5, scores={"ocr": 0.5})
    place = {"media_uri": ref.uri, "media_size_bytes": ref.size_bytes, "media_sha256": ref.sha256}
    await api.store.samples.put(job_id, sample.model_copy(update=place))
    [shown] = (await api.client.get(f"/v1/jobs/{job_id}/samples", params={"step": 1, "order": "best"})).json()["items"]
    assert (shown["prompt"], shown["reward"], shown["scores"]) == ("a sign", 0.5, {"ocr": 0.5})
    picture = await api.client.get(shown["media"])
    assert (picture.content, picture.headers["content-type"]) == (b"\x89PNG picture", "image/png")
    await api.services.blobs.delete([ref])
    gone = await api.client.get(shown["media"])
    assert gone.status_code == 404
    assert gone.json()["detail"].startswith("the picture of sample 1/0/2 was deleted: ")


async def test_system(api: Api, job: Job) -> None:
    await api.submit(job())
    assert (await api.client.get("/healthz")).json() == {"status": "ok"}
    assert (await api.client.get("/readyz")).json() == {"status": "ok"}
    assert (await api.client.get("/v1/version")).json()["api"] == "v1"
    fleet = (await api.client.get("/v1/fleet")).json()
    assert fleet["rewards"] == {"ocr": ["127.0.0.1:7001"], "jpeg": ["127.0.0.1:7002"]}
    assert (fleet["pools"], fleet["shortages"]) == (None, [])
    assert [(r["replica_id"], r["health"], r["version"]) for r in fleet["replicas"]] == [("rollout-0", "serving", 3)]
    assert fleet["reward_load"] == {}
    await api.store.rewards.put_load({"ocr": RewardLoad(in_flight=1, calls=2, failures=0, latency_p50_s=0.5)})
    load = (await api.client.get("/v1/fleet")).json()["reward_load"]["ocr"]
    assert (load["in_flight"], load["latency_p50_s"], load["latency_p99_s"]) == (1, 0.5, None)
    metrics = await api.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'flowfleet_controller_jobs{status="queued"}' in metrics.text


async def test_not_ready_when_the_runner_died(api: Api) -> None:
    await api.services.runner.stop()
    response = await api.client.get("/readyz")
    assert (response.status_code, response.json()["detail"][:10]) == (503, "the schedu")
    assert (await api.client.get("/healthz")).status_code == 503, "nothing requested that: the probe restarts it"
    api.services.closing.set()
    assert (await api.client.get("/healthz")).status_code == 200, "while it shuts down that is as it should be"


async def test_jobs_outlive_the_controller(settings: ControllerSettings, job: Job) -> None:
    async with serve(settings) as first:
        record = await first.submit(job())
    async with serve(settings) as second:
        assert (await second.client.get(f"/v1/jobs/{record['id']}")).json() == record
        assert await second.store.jobs.active() == [record["id"]]


@pytest.mark.parametrize("part", ["", "/events", "/metrics", "/checkpoints", "/samples", "/samples/0/0/0/media"])
@pytest.mark.parametrize("job_id", ["01a20091-df5f-7685-9395-c3a57230f852", "nonsense", "%2e%2e%2fx"])
async def test_an_unknown_job_is_not_found(api: Api, part: str, job_id: str) -> None:
    response = await api.client.get(f"/v1/jobs/{job_id}{part}")
    assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json")
