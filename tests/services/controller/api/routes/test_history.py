"""What a job left behind, as the page asks for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flowfleet.api.jobs import Checkpoint
from services.controller.store.credits import Trained
from services.controller.store.records import SampleRecord, Validation
from tests.services.controller.conftest import Api

Job = Callable[..., dict[str, Any]]


async def test_the_trace_of_a_sample(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    url = f"/v1/jobs/{job_id}/samples"
    records = [
        SampleRecord(step=3, group=1, index=i, prompt="p", reward=0.5 * i, replica="r-1", seed=7, policy_version=3)
        for i in (0, 1)
    ]
    lost = SampleRecord(step=3, group=1, index=2, prompt="p", drop_reason="gated", gated_by="safe")
    await api.store.samples.put(job_id, *records, lost, SampleRecord(step=3, group=2, index=0, prompt="q"))
    assert (await api.client.get(f"{url}/3/1/0")).json()["trained_as"] is None  # not yet
    await api.store.credits.put(job_id, 3, [Trained(1, 0, -0.5, 0.75), Trained(1, 1, 0.5, None)])
    for steps in (2, 3, 6, 8):
        await api.store.history.add_checkpoint(
            job_id, Checkpoint(step=steps, path=f"c{steps}", created_at=datetime.now(UTC))
        )
    trace = (await api.client.get(f"{url}/3/1/0")).json()
    assert (trace["advantage"], trace["ratio"], trace["trained_as"]) == (-0.5, 0.75, 4)
    assert trace["checkpoint"]["step"] == 6  # the steps before the fourth are all that 3 covers
    assert (trace["sample"]["replica"], trace["sample"]["seed"]) == ("r-1", 7)
    assert [(one["index"], one["advantage"], one["drop_reason"]) for one in trace["group"]] == [
        (0, -0.5, ""),
        (1, 0.5, ""),
        (2, None, "gated"),
    ]
    assert trace["group"][0]["media"] == trace["sample"]["media"]
    trace = (await api.client.get(f"{url}/3/1/2")).json()
    assert (trace["advantage"], trace["trained_as"], trace["checkpoint"]) == (None, None, None)
    assert (await api.client.get(f"{url}/3/1/9")).status_code == 404
    assert (await api.client.get(f"{url}/3/1/0", params={"purpose": "validate"})).status_code == 404


async def test_samples_by_groups_and_by_one_reward(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    url = f"/v1/jobs/{job_id}/samples"
    places = [(group, index) for group in range(4) for index in range(3)]
    await api.store.samples.put(
        job_id,
        *(SampleRecord(step=0, group=g, index=i, prompt="p", reward=1.0, scores={"ocr": g - i}) for g, i in places),
    )

    async def asked(**params: Any) -> list[tuple[int, int]]:
        response = await api.client.get(url, params=params)
        assert response.status_code == 200, response.text
        return [(one["group"], one["index"]) for one in response.json()["items"]]

    assert await asked(each="group", order="oldest") == [(g, 0) for g in range(4)]
    assert await asked(step=0, group_from=1, group_to=3, order="oldest") == [(g, i) for g in (1, 2) for i in range(3)]
    assert await asked(step=0, group_from=3, order="oldest") == [(3, i) for i in range(3)]
    assert (await asked(step=0, by="ocr", order="best"))[0] == (3, 0)
    assert (await asked(step=0, by="ocr", order="worst"))[0] == (0, 2)
    for wrong in ({"by": "ocr"}, {"group_from": 1}, {"each": "group", "order": "best"}):
        refused = await api.client.get(url, params=wrong)
        assert (refused.status_code, "give" in refused.json()["detail"]) == (400, True)


async def test_validations_ascend(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    for version in (4, 0):
        await api.store.history.add_validation(
            job_id, Validation(version=version, reward=0.5, values={"val/reward": 0.5})
        )
    found = (await api.client.get(f"/v1/jobs/{job_id}/validations")).json()["items"]
    assert [one["version"] for one in found] == [0, 4]
