"""Prompt files that users send: what is stored, what is refused, and how jobs read them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.prompts.uploads import parts_of
from services.controller.api.routes import uploads as api_uploads
from services.controller.jobs.submission.checks import parse
from services.controller.jobs.submission.opening import open_job
from services.controller.limits import Limits
from services.controller.prompts.uploads import AT_ONCE, GRACE_S, Uploads
from services.controller.reading.places import NotAllowed
from services.controller.retention.keep import Keep
from services.controller.retention.keeper import Keeper
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api, serve

PROMPTS = b'{"prompt": "a red sign", "target": "K7"}\n{"prompt": "a blue sign", "target": "Z3"}\n'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def put(api: Api, data: bytes, name: str = "prompts.jsonl", digest: str = "") -> Any:
    return await api.client.put(f"/v1/uploads/{digest or sha256(data)}/{name}", content=data)


def stored(api: Api) -> list[str]:
    folder = api.services.settings.state_dir / "uploads"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_an_upload_is_data_of_a_job(api: Api, job: Any) -> None:
    for _ in range(2):  # the same once more changes nothing
        answer = await put(api, PROMPTS)
        assert (answer.status_code, answer.json()["size_bytes"]) == (201, len(PROMPTS))
    place = answer.json()["place"]
    assert parts_of(place) == (sha256(PROMPTS), "prompts.jsonl")
    assert stored(api) == [f"{sha256(PROMPTS)}/prompts.jsonl"]
    source = {"name": "mine", "path": place, "validation": place}
    for data in ({"train": place}, {"train": place, "validation": place}, {"sources": [source]}):
        record = await api.submit(job(data=data))
        opened = await asyncio.to_thread(open_job, parse(job(data=record["spec"]["data"])), api.services.sources)
        assert [(one.text, one.metadata) for one in opened.training[0]] == [
            ("a red sign", {"target": "K7"}), ("a blue sign", {"target": "Z3"}),
        ]  # fmt: skip
        assert opened.training[0][1].source == f"{place}:2", "errors name the file and the line"


@pytest.mark.parametrize(
    "name",
    ["a.py", "model.safetensors", "a", ".txt", "-a.txt", "a%2Fb.txt", "..%2Fb.txt", "a b.txt", "a.txt%00", "ä.txt"],
)
async def test_only_plain_names_of_prompt_files_are_taken(api: Api, name: str) -> None:
    answer = await put(api, PROMPTS, name)
    assert answer.status_code in (400, 404, 422), answer.text
    assert stored(api) == []


async def test_what_is_not_the_content_of_its_digest_is_not_kept(api: Api) -> None:
    answer = await put(api, PROMPTS[:-1], digest=sha256(PROMPTS))
    assert (answer.status_code, "send the file again" in answer.json()["detail"]) == (400, True)
    assert (await put(api, PROMPTS, digest="0" * 63)).status_code == 422
    assert stored(api) == []


async def test_limits_hold_with_and_without_a_length(settings: ControllerSettings) -> None:
    few = settings.model_copy(update={"limits": Limits(upload_bytes=100, uploads_bytes=150)})

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"a" * 64

    async with serve(few) as api:
        for body in (b"a" * 101, endless()):
            answer = await api.client.put(f"/v1/uploads/{'0' * 64}/a.txt", content=body)
            assert (answer.status_code, "--limit upload_bytes" in answer.json()["detail"]) == (413, True)
        assert (await put(api, b"a" * 100, "a.txt")).status_code == 201
        full = await put(api, b"b" * 100, "a.txt")
        assert (full.status_code, "--limit uploads_bytes" in full.json()["detail"]) == (507, True)
        assert stored(api) == [f"{sha256(b'a' * 100)}/a.txt"]
        assert (await put(api, b"a" * 100, "a.txt")).status_code == 201  # what is there needs no room again
        assert (await put(api, b"a" * 100, "b.txt")).status_code == 507


async def test_a_body_that_pauses_is_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_uploads, "SILENCE_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(1.0)

    answer = await api.client.put(f"/v1/uploads/{sha256(b'a')}/a.txt", content=slow())
    assert answer.status_code == 408
    assert stored(api) == []


async def test_a_body_that_trickles_is_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_uploads, "SILENCE_S", 0.2)

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"a"
            await asyncio.sleep(0.01)

    answer = await api.client.put(f"/v1/uploads/{sha256(b'a' * 200)}/a.txt", content=trickle())
    assert (answer.status_code, "bytes a second" in answer.json()["detail"]) == (408, True)


async def test_one_caller_never_holds_all_slots(tmp_path: Path) -> None:
    uploads, go, begun = Uploads(tmp_path, 100, 1000), asyncio.Event(), list[str]()

    async def held(caller: str) -> AsyncIterator[bytes]:
        begun.append(caller)
        await go.wait()
        yield b"a"

    greedy = [asyncio.create_task(uploads.put(sha256(b"a"), "a.txt", held("greedy"), "greedy")) for _ in range(9)]
    other = asyncio.create_task(uploads.put(sha256(b"a"), "b.txt", held("other"), "other"))
    while "other" not in begun:
        await asyncio.sleep(0.01)
    assert len(begun) < AT_ONCE
    go.set()
    assert await asyncio.gather(*greedy, other) == [1] * 10


@pytest.mark.parametrize("umask", [0o000, 0o022])
async def test_nobody_changes_an_upload_after_its_digest_was_checked(api: Api, tmp_path: Path, umask: int) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield PROMPTS
        assert modes(tmp_path, "part-*") == [0o600]

    before = os.umask(umask)
    try:
        sent = await api.client.put(f"/v1/uploads/{sha256(PROMPTS)}/prompts.jsonl", content=body())
    finally:
        os.umask(before)
    assert sent.status_code == 201
    found = [modes(tmp_path, name) for name in ("uploads", sha256(PROMPTS), "prompts.jsonl")]
    assert found == [[0o700], [0o700], [0o400]]


def modes(folder: Path, name: str) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in folder.rglob(name)]


async def test_a_job_reads_uploads_alone_by_that_name(api: Api, job: Any) -> None:
    state = api.services.settings.state_dir
    place = (await put(api, PROMPTS)).json()["place"]
    folder = state / "uploads" / sha256(PROMPTS)
    (state / "secret.txt").write_text("a secret\n")
    (folder / "link.txt").symlink_to(state / "secret.txt")
    by_path = str(folder / "prompts.jsonl")
    for wrong in (
        place.replace("prompts", "other"), f"upload:{sha256(PROMPTS)}/link.txt", "upload:x", "upload:../secret.txt",
        f"upload:{sha256(PROMPTS)}/../../secret.txt", by_path,
    ):  # fmt: skip
        answer = await api.client.post("/v1/jobs", json=job(data={"train": wrong}))
        assert answer.status_code == 422, wrong
        assert [error["setting"] for error in answer.json()["errors"]] == ["data.train"]
        with pytest.raises(NotAllowed):
            os.close(api.services.sources.places.open(wrong))


async def test_images_of_uploaded_prompts_say_what_to_do(api: Api, job: Any) -> None:
    data = b'{"prompt": "edit it", "images": ["pictures/a.png"]}\n'
    place = (await put(api, data)).json()["place"]
    answer = await api.client.post("/v1/jobs", json=job(data={"train": place}))
    (error,) = answer.json()["errors"]
    assert "prompts.jsonl:1" in error["detail"]
    assert "put them into a store or folder that the controller reads" in error["detail"]


async def test_an_upload_goes_with_the_last_job_that_names_it(api: Api, job: Any, tmp_path: Path) -> None:
    places = [(await put(api, data, "a.txt")).json()["place"] for data in (b"kept\n", b"gone\n", b"fresh\n")]
    jobs = [(await api.submit(job(data={"train": place})))["id"] for place in places[:2]]
    uploads = api.services.uploads
    folder = api.services.settings.state_dir / "uploads"
    (folder / "part-0").write_text("an upload that broke off")
    for entry in folder.iterdir():
        if entry.name != sha256(b"fresh\n"):
            os.utime(entry, (time.time() - GRACE_S - 60,) * 2)
    keeper = Keeper(api.store, api.services.blobs, Keep(), uploads=uploads)
    await api.store.jobs.set_status(jobs[1], "cancelled", "")
    await api.store.removal.remove(jobs[1], "was deleted")
    await keeper.look()
    assert stored(api) == sorted(f"{sha256(data)}/a.txt" for data in (b"kept\n", b"fresh\n"))
    refused = await api.client.post("/v1/jobs", json=job(data={"train": places[1]}))
    assert "upload the file again" in refused.json()["errors"][0]["detail"]
