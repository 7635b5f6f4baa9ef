"""Bad input: a clear problem, no stack trace, and the jobs as they were."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.controller.api.body import MAX_BYTES
from tests.services.controller.conftest import Api

Job = Callable[..., dict[str, Any]]


@pytest.fixture
async def jobs(api: Api, job: Job) -> AsyncIterator[Api]:
    """An API with one job, which must be the only one afterwards, unchanged."""
    record = await api.submit(job())
    yield api
    assert [row["id"] for row in (await api.client.get("/v1/jobs")).json()["items"]] == [record["id"]]
    assert (await api.client.get(f"/v1/jobs/{record['id']}")).json() == record


def check_problem(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert len(response.content) < 20_000
    assert "Traceback" not in response.text
    assert 'File "' not in response.text
    for word in words:
        assert word in response.text, (word, response.text)
    return problem


BAD_JOBS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown key": ({"rollout": {"group_sise": 4}}, "rollout.group_sise", "did you mean rollout.group_size?"),
    "unknown part": ({"trainr": {}}, "trainr", "did you mean trainer?"),
    "missing model": ({"model": {}}, "model.path", "field required"),
    "no such model": ({"model": {"path": "/no/such/model"}}, "model.path", "--data-root"),
    "no such prompts": ({"data": {"train": "/no/such/file.txt"}}, "data.train", "--data-root"),
    "prompts are a device": ({"data": {"train": "/dev/zero"}}, "data.train", "no job may read it"),
    "prompts of no known protocol": ({"data": {"train": "gopher9://x/y.txt"}}, "data.train", "gopher9"),
    "unknown reward": ({"rewards": {"beauty": {}}}, "rewards.beauty", "it has: jpeg, ocr"),
    "no reward": ({"rewards": {}}, "rewards", "at least one"),
    "wrong type": ({"rollout": {"group_size": "many"}}, "rollout.group_size", "is not a whole number"),
    "part is a list": ({"rollout": [1]}, "rollout", "rolloutpart"),
    "absurd size": ({"rollout": {"height": 10**12}}, "rollout.height", "less than or equal to 8192"),
    "absurd float": ({"trainer": {"optimizer": {"lr": 1e300}}}, "trainer.optimizer.lr", "less than 1"),
    "negative": ({"schedule": {"steps": -1}}, "schedule.steps", "greater than or equal to 0"),
    "unknown algorithm": ({"algorithm": {"name": "flow_grp"}}, "algorithm.name", "did you mean flow_grpo?"),
    "unknown loss": ({"algorithm": {"loss": "flow_dpo"}}, "algorithm.loss", "did you mean flow_dppo?"),
    "no noise for a policy loss": ({"rollout": {"noise": {"eta": 0.0}}}, "rollout.noise.eta", "diffusion_nft"),
    "correction without ratios": (
        {"algorithm": {"name": "diffusion_nft", "correction": {"mode": "band"}}},
        "algorithm.correction",
        "leave it out",
    ),
    "no old mean": (
        {"algorithm": {"name": "grpo_guard", "old_log_probs": "rollout"}},
        "algorithm.loss",
        "needs the old policy's means",
    ),
    "not Gaussian": (
        {"algorithm": {"name": "flow_cps", "loss": "grpo_guard"}},
        "algorithm.loss",
        "set that to sde or dance_sde",
    ),
    "unheard setting": ({"algorithm": {"pairs_per_group": 2}}, "algorithm.pairs_per_group", "use dpo"),
    "too many pairs": (
        {"algorithm": {"name": "online_dpo", "pairs_per_group": 9}},
        "algorithm.pairs_per_group",
        "at least 18",
    ),
    "pairs of three": (
        {"algorithm": {"name": "dpo"}, "rollout": {"group_size": 3}},
        "algorithm.name",
        "leave rollout.group_size at 2",
    ),
    "frames of a picture": ({"rollout": {"num_frames": 9}}, "rollout.num_frames", "qwen-image makes pictures"),
    "no embedded guidance": (
        {"rollout": {"embedded_guidance": 3.5}},
        "rollout.embedded_guidance",
        "no effect on qwen-image",
    ),
    "no condition images": ({"rollout": {"condition_pixels": 4096}}, "rollout.condition_pixels", "takes no images"),
    "prompts as preferences": ({"algorithm": {"name": "dpo"}}, "data.train", "preferences have columns"),
    "long negative prompt": ({"rollout": {"negative_prompt": "x" * 32769}}, "rollout.negative_prompt", "at most 32768"),
    "bad name": ({"name": "No Spaces!"}, "name", "give up to 63 lowercase letters"),
    "long key": ({"k" * 50_000: 1}, "k" * 200 + " … " + "k" * 397, "unknown setting"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
async def test_a_bad_job_is_refused_with_its_setting(jobs: Api, job: Job, name: str) -> None:
    parts, setting, words = BAD_JOBS[name]
    body = json.dumps(job(**parts))
    response = await jobs.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    problem = check_problem(response, 422)
    [error] = problem["errors"]
    assert error["setting"] == setting
    assert words in error["detail"].lower()


async def test_every_problem_is_named_at_once(jobs: Api, job: Job) -> None:
    response = await jobs.client.post("/v1/jobs", json=job(rollout={"width": 7}, seed="x", model={}))
    problem = check_problem(response, 422, "3 settings")
    assert {error["setting"] for error in problem["errors"]} == {"rollout.width", "seed", "model.path"}
    response = await jobs.client.post("/v1/jobs", json=job(data={"train": "/no"}, rewards={"x": {}}))
    assert {error["setting"] for error in check_problem(response, 422)["errors"]} == {"data.train", "rewards.x"}


async def test_unreadable_and_empty_files(jobs: Api, job: Job, tmp_path: Path) -> None:
    empty, binary, fields = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "bad.jsonl"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    fields.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    not_text = "binary.txt:1: the file is UTF-16 or no text: save it as UTF-8"
    expected = {empty: "holds no prompt", binary: not_text, fields: "bad.jsonl:2"}
    for path, words in expected.items():
        train = str(path)
        good = job()["data"]["train"]
        response = await jobs.client.post("/v1/jobs", json=job(data={"train": good, "validation": train}))
        check_problem(response, 422, "data.validation", words)


async def test_a_file_without_permission(jobs: Api, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "secret.txt", os.open
    path.write_text("a")
    path.chmod(0)

    def refusing(place: Any, *flags: Any, **others: Any) -> int:
        """Root may read the file, so it gets the kernel's answer to other users from here."""
        if str(place) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        return real(place, *flags, **others)

    monkeypatch.setattr(os, "open", refusing)
    response = await jobs.client.post("/v1/jobs", json=job(data={"train": str(path)}))
    check_problem(response, 422, "data.train", "Permission denied")


BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "not valid JSON"),
    "malformed": (b'{"model": ', 400, "not valid JSON"),
    "not UTF-8": (b'{"name": "\xff"}', 400, "not valid JSON"),
    "a list": (b"[]", 400, "JSON object"),
    "NaN": (b'{"seed": NaN}', 400, "NaN is not a JSON number"),
    "key twice": (b'{"seed": 1, "seed": 2}', 400, "'seed' is given twice"),
    "huge number": (b'{"seed": ' + b"9" * 10_000 + b"}", 400, "not valid JSON"),
    "bomb of lists": (b"[" * 500_000, 400, "nested too deeply"),
    "bomb of objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "nested too deeply"),
    "half a character": (b'{"name": "\\ud800"}', 400, "surrogate"),
    "half a character in a key": (b'{"\\udfff": 1}', 400, "surrogate"),
    "deep": (b'{"a":' * 40 + b"1" + b"}" * 40, 400, "deeper than 32"),
    "many values": (b'{"a": [' + b"1," * 100_000 + b"1]}", 400, "more than 5000 values"),
    "oversize": (b'{"name": "' + b"x" * MAX_BYTES + b'"}', 413, "at most 1048576 bytes"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_refused(jobs: Api, name: str) -> None:
    body, status, words = BAD_BODIES[name]
    response = await jobs.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    check_problem(response, status, words)


async def test_an_oversize_body_in_chunks_is_cut_off(jobs: Api) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1 << 16
            yield b"x" * (1 << 16)

    response = await jobs.client.post("/v1/jobs", content=chunks(), headers={"Content-Type": "application/json"})
    check_problem(response, 413)
    assert MAX_BYTES < sent < 2 * MAX_BYTES  # of 4 MiB


async def test_a_body_that_does_not_come_is_not_waited_for(jobs: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    monkeypatch.setattr("services.controller.api.body.TIMEOUT_S", 0.05)
    response = await jobs.client.post("/v1/jobs", content=slow(), headers={"Content-Type": "application/json"})
    check_problem(response, 408)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/toml", ""])
async def test_another_content_type_is_refused(jobs: Api, job: Job, content_type: str) -> None:
    body = json.dumps(job())
    response = await jobs.client.post("/v1/jobs", content=body, headers={"Content-Type": content_type})
    check_problem(response, 415, "application/json")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/jobs/", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?limit=many", 422),
        ("GET", "/v1/jobs?cursor=here", 422),
        ("GET", "/v1/jobs?status=lost", 422),
        ("GET", "/v1/jobs/{id}/events?cursor=18446744073709551616-0", 400),
        ("GET", "/v1/jobs/{id}/events?cursor=$", 400),
        ("GET", "/v1/jobs/{id}/events?cursor=", 400),
        ("GET", "/v1/jobs/{id}/samples?cursor=zzz", 400),
        ("GET", "/v1/jobs/{id}/samples?order=odd", 422),
        ("GET", "/v1/jobs/{id}/samples?step=-1", 422),
        ("GET", "/v1/jobs/{id}/samples/0/0/x/media", 422),
        ("GET", "/v1/jobs/{id}/samples/0/0/99999999999999999999/media", 404),
        ("GET", "/v1/jobs/{id}/samples/0/0/0/media", 404),
        ("POST", "/v1/jobs/{id}/explode", 404),
    ],
)
async def test_bad_requests(jobs: Api, method: str, path: str, status: int) -> None:
    job_id = (await jobs.client.get("/v1/jobs")).json()["items"][0]["id"]
    check_problem(await jobs.client.request(method, path.replace("{id}", job_id)), status)


async def test_an_error_of_ours_stays_in_the_log(jobs: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(jobs.store.jobs, "get", broken)
        job_id = (await jobs.store.jobs.active())[0]
        response = await jobs.client.get(f"/v1/jobs/{job_id}")
    check_problem(response, 500)
    assert "secret" not in response.text
