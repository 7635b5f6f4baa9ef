"""A job for a controller that sees other files: data that lie here are uploaded."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from flowfleet.api.problems import ApiError
from flowfleet.cli.views import show_uploads
from flowfleet.client import Client, asynchronous
from flowfleet.job.files import prepare_job
from flowfleet.prompts.uploads import name_of, parts_of, place_of
from tests.flowfleet.idle_controller import job_settings

JOB_ID = "01890000-0000-7000-8000-000000000001"


class Controller:
    """Reads uploads and URLs alone, as one of a cluster does."""

    def __init__(self, filesystem: str = "other") -> None:
        self.filesystem = filesystem
        self.files: dict[str, bytes] = {}
        self.submitted: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/v1/uploads/"):
            _, _, _, digest, name = request.url.path.split("/")
            data = request.read()
            assert hashlib.sha256(data).hexdigest() == digest
            assert request.headers["content-length"] == str(len(data))
            self.files[f"upload:{digest}/{name}"] = data
            return httpx.Response(201, json={"place": f"upload:{digest}/{name}", "size_bytes": len(data)})
        if request.url.path == "/v1/version":
            return httpx.Response(200, json={"version": "1", "api": "v1", "filesystem": self.filesystem})
        job = json.loads(request.read())
        self.keys.append(request.headers["idempotency-key"])
        places = {"data.train": job["data"]["train"], "data.validation": job["data"]["validation"]}
        places |= {f"data.sources.{k}.path": source["path"] for k, source in enumerate(job["data"]["sources"])}
        wrong = [name for name, place in places.items() if place and "://" not in place and place not in self.files]
        if wrong:
            errors = [{"setting": name, "detail": f"{name}: there is no file"} for name in wrong]
            body = {"title": "Invalid job", "status": 422, "detail": "the job cannot run", "errors": errors}
            return httpx.Response(422, json=body, headers={"content-type": "application/problem+json"})
        self.submitted.append(job)
        return httpx.Response(202, json={"id": JOB_ID, "name": "job", "status": "queued", "spec": job, **TIMES})

    def client(self) -> Client:
        return Client("http://controller:8470", transport=httpx.MockTransport(self))


TIMES = {"created_at": "2026-01-01T00:00:00Z", "pool": "default", "desired": "running"}


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text("prompt\na sign\n")
    (tmp_path / "job.toml").write_text('model.path = "/m"\nrewards.ocr = {}\ndata.train = "train.csv"\n')
    return tmp_path / "job.toml"


def test_a_file_beside_the_job_is_uploaded_and_named(job_file: Path) -> None:
    controller = Controller()
    with controller.client() as client:
        client.submit(job_file)
    (place,) = controller.files
    assert controller.files[place] == b"prompt\na sign\n"
    assert [job["data"]["train"] for job in controller.submitted] == [place]
    assert len(set(controller.keys)) == 1, "both tries are one submit"


def test_what_was_uploaded_is_told_also_of_a_newer_controllers_job(job_file: Path) -> None:
    controller, console = Controller(), Console(file=io.StringIO(), width=200)
    spec = prepare_job(job_file, same_machine=False)
    with controller.client() as client:
        job = client.submit(spec, file=job_file)
    job.spec["rollout"]["setting_of_tomorrow"] = 1
    show_uploads(spec, job, console)
    (place,) = controller.files
    assert console.file.getvalue() == f"data.train: uploaded train.csv as {place}\n"  # type: ignore[attr-defined]


def test_sources_are_uploaded_each_and_urls_stay(job_file: Path) -> None:
    text = 'model.path = "/m"\nrewards.ocr = {}\n[[data.sources]]\nname = "a"\npath = "https://host/a.txt"\n'
    job_file.write_text(f'{text}[[data.sources]]\nname = "b"\npath = "train.csv"\n')
    controller = Controller()
    with controller.client() as client:
        client.submit(job_file)
    assert [source["path"] for source in controller.submitted[0]["data"]["sources"]] == [
        "https://host/a.txt", *controller.files,
    ]  # fmt: skip


def test_what_is_not_here_either_is_refused_in_the_controllers_words(job_file: Path) -> None:
    job_file.with_name("train.csv").unlink()
    controller = Controller()
    with controller.client() as client, pytest.raises(ApiError, match="there is no file"):
        client.submit(job_file)
    assert controller.files == {}


def test_a_file_that_the_controller_reads_stays_a_path(job_file: Path) -> None:
    controller = Controller()
    controller.files["train.csv"] = b""
    with controller.client() as client:
        client.submit(job_file)
    assert [job["data"]["train"] for job in controller.submitted] == ["train.csv"]


def test_names_are_made_plain(tmp_path: Path) -> None:
    names = [name_of(Path(name)) for name in ("a.TXT", "my prompts (2).csv", "..ä.json", "x" * 300 + ".parquet")]
    assert names[:3] == ["a.txt", "my_prompts__2_.csv", "prompts.json"]
    assert all(parts_of(place_of("0" * 64, name)) for name in names)
    with pytest.raises(ValueError, match="only prompt files"):
        name_of(Path("reward.py"))
    with Controller().client() as client, pytest.raises(ValueError, match="is a folder"):
        client.upload(tmp_path)


def test_a_real_controller_takes_uploads_and_refuses_large_ones_at_once(
    api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = job_settings(tmp_path)
    (tmp_path / "mine.csv").write_text("prompt\n" + "".join(f"sign {k}\n" for k in range(300_000)))
    (tmp_path / "job.json").write_text(json.dumps({**settings, "data": {"train": "mine.csv"}}))
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(256 * 2**20 + 1)
    monkeypatch.setattr(asynchronous, "filesystem_id", lambda: "of another machine")
    with Client(api_url) as client:
        job = client.submit(tmp_path / "job.json")
        assert job.spec["data"]["train"] == client.upload(tmp_path / "mine.csv")
        with pytest.raises(ApiError, match="--limit upload_bytes") as refused:
            client.upload(tmp_path / "large.txt")
        assert refused.value.status == 413
