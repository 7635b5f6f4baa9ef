"""Jobs that name a model of the Hub, submitted through the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet import hub
from services.controller.jobs.submission.opening import open_job
from tests.hub_models import NEW, OLD, Site, served
from tests.services.controller.conftest import Api

pytest.importorskip("huggingface_hub")
Job = Callable[..., dict[str, Any]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with served(tmp_path, monkeypatch) as found:
        yield found


async def test_a_job_keeps_the_commit_that_its_submit_found(
    api: Api, job: Job, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, key = job(model={"path": "Org/Model@main"}), {"Idempotency-Key": "once"}
    first = await api.client.post("/v1/jobs", json=asked, headers=key)
    assert first.status_code == 202, first.text
    pinned = f"Org/Model@{OLD}"
    assert first.json()["spec"]["model"]["path"] == pinned
    site.commit.insert(0, NEW)
    again = await api.client.post("/v1/jobs", json=asked, headers=key)
    assert again.json()["id"] == first.json()["id"]  # what its user wrote is the same
    later = await api.client.post("/v1/jobs", json=asked)
    assert later.json()["spec"]["model"]["path"] == f"Org/Model@{NEW}"

    spec = (await api.store.jobs.get(first.json()["id"])).job_spec()
    site.asked.clear()
    assert open_job(spec, api.services.sources).spec.model.path == pinned  # a restart makes no request
    assert site.asked == []
    monkeypatch.setenv(hub.MODELS, "Other")
    with pytest.raises(ValueError, match="not among the Hub's models"):
        open_job(spec, api.services.sources)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("Other/Model", "`hf download Other/Model --local-dir FOLDER`"),
        ("Org/Absent", "the Hub has no such model"),
        ("Org/Model@nowhere", "it has no revision 'nowhere' there"),
    ],
)
async def test_a_name_that_cannot_be_had_is_refused_at_submit(
    api: Api, job: Job, site: Site, path: str, told: str
) -> None:
    response = await api.client.post("/v1/jobs", json=job(model={"path": path}))
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert error["setting"] == "model.path"
    assert told in error["detail"]


async def test_a_model_of_the_hub_is_checked_as_a_folder_is(api: Api, job: Job, site: Site) -> None:
    response = await api.client.post("/v1/jobs", json=job(model={"path": "Org/Model"}, rollout={"num_frames": 9}))
    [error] = response.json()["errors"]
    assert (error["setting"], "makes pictures" in error["detail"]) == ("rollout.num_frames", True)
