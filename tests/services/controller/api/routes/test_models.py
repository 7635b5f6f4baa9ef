"""The model of a job by REST: what it lists, its files, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models_on_disk import write_model
from tests.services.controller.conftest import Api


async def test_a_model_is_served_file_by_file_and_nothing_else(api: Api, job: Any, tmp_path: Path) -> None:
    submitted = await api.submit(job())
    place = f"/v1/jobs/{submitted['id']}/model"
    missing = await api.client.get(place)
    assert (missing.status_code, "has no model yet" in missing.json()["detail"]) == (404, True)
    folder = api.services.settings.state_dir / "jobs" / submitted["id"]
    older = write_model(folder / "checkpoints" / "step-00000001" / "model", submitted["id"], 1, b"old")
    newer = write_model(folder / "checkpoints" / "step-00000012" / "model", submitted["id"], 12, b"new weights")
    assert (await api.client.get(place)).json() == newer.model_dump(mode="json")
    assert (await api.client.get(place, params={"step": 1})).json() == older.model_dump(mode="json")
    name = "transformer_2/adapter_model.safetensors"
    assert (await api.client.get(f"{place}/files/{name}")).content == b"new weights"
    assert (await api.client.get(f"{place}/files/{name}", params={"step": 1})).content == b"old"
    changed = await api.client.get(f"{place}/files/{name}", params={"crc32": older.files[name].crc32})
    assert changed.status_code == 409
    (folder / "secret").write_text("no")
    (folder / "checkpoints" / "step-00000012" / "model" / "not-listed").write_text("no")
    for wrong in ("../../secret", "%2e%2e/secret", "not-listed", "", "a%00b", "/etc/passwd", "flowfleet.json/x"):
        assert (await api.client.get(f"{place}/files/{wrong}")).status_code == 404, wrong
    (folder / "checkpoints" / "step-00000012" / "model" / "README.md").unlink()
    (folder / "checkpoints" / "step-00000012" / "model" / "README.md").symlink_to(folder / "secret")
    assert (await api.client.get(f"{place}/files/README.md")).status_code == 404


async def test_steps_are_asked_for_and_what_cannot_be_is_said(api: Api, job: Any) -> None:
    decaying = job(trainer={"optimizer": {"lr_schedule": "cosine"}}, schedule={"steps": 5})
    for settings, steps, status in ((job(), 200, 202), (decaying, 4, 202), (decaying, 6, 422), (job(), 0, 422)):
        record = await api.submit(settings)
        answer = await api.client.post(f"/v1/jobs/{record['id']}/extend", params={"steps": steps})
        assert answer.status_code == status, answer.text
    assert "steps: " in answer.json()["detail"]
    record = await api.submit(job())
    early = await api.client.post(f"/v1/jobs/{record['id']}/finish")
    assert (early.status_code, "cancel it" in early.json()["detail"]) == (409, True)
    await api.store.jobs.update_progress(record["id"], step=3)
    assert (await api.client.post(f"/v1/jobs/{record['id']}/finish")).status_code == 202
    past = await api.client.post(f"/v1/jobs/{record['id']}/extend", params={"steps": 3})
    assert (past.status_code, "has done 3 steps" in past.json()["detail"]) == (409, True)
    asked = [event.data for event in await api.store.events.read(record["id"]) if event.type == "request"]
    assert asked == [{"action": "finish"}]
