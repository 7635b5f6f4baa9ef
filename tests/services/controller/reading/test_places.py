"""Which files and URLs a job may name, asked of the rules and through the API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.controller.jobs.submission.checks import parse
from services.controller.jobs.submission.opening import open_job
from services.controller.prompts.sources import Sources
from services.controller.reading.places import NotAllowed, Places, url_origin
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api

Job = Callable[..., dict[str, Any]]
JOB_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Jobs may read `data`; `state` lies in it, `secret.txt` next to it."""
    (tmp_path / "data" / "state" / "jobs" / JOB_ID / "model").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "state" / "stack.json").write_text("password")
    (tmp_path / "secret.txt").write_text("secret")
    return Places.of([tmp_path / "data"], ["https://data.example.org"], tmp_path / "data" / "state")


def test_what_lies_below_a_root_may_be_read(places: Places, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "within").symlink_to("a.txt")
    (tmp_path / "alias").symlink_to(folder)
    for path in (folder / "a.txt", folder / "x" / ".." / "a.txt", folder / "within", tmp_path / "alias" / "a.txt"):
        with os.fdopen(places.open(str(path))) as file:
            assert file.read() == "a"
    with os.fdopen(places.open(f"file://{folder}/a.txt")) as file:
        assert file.read() == "a"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("secret.txt", "--data-root"),
        ("nowhere.txt", "--data-root"),
        ("data/../secret.txt", "--data-root"),
        ("data/leads-out", "--data-root"),
        ("data/folder-out/secret.txt", "--data-root"),
        ("data/state/stack.json", "job:ID"),
        ("data/to-state/stack.json", "job:ID"),
        ("data/environ", "no job may read it"),
        ("/proc/self/environ", "no job may read it"),
        ("/proc/self/root/etc/shadow", "--data-root"),
        ("/sys/kernel/notes", "no job may read it"),
        ("/dev/zero", "no job may read it"),
        ("/var/run/secrets/kubernetes.io/serviceaccount/token", "no job may read it"),
        ("/run/secrets/token", "no job may read it"),
        ("/etc/shadow", "--data-root"),
        ("file:///etc/shadow", "--data-root"),
        ("file:///proc/self/environ", "no job may read it"),
        ("a\0b", "cannot be a path"),
    ],
)
def test_nothing_else_may_be_read(places: Places, tmp_path: Path, path: str, words: str) -> None:
    folder = tmp_path / "data"
    (folder / "leads-out").symlink_to(tmp_path / "secret.txt")
    (folder / "folder-out").symlink_to(tmp_path)
    (folder / "to-state").symlink_to(folder / "state")
    (folder / "environ").symlink_to("/proc/self/environ")
    place = path if path.startswith(("/", "file:")) else str(tmp_path / path)
    for read in (places.check, places.open):
        with pytest.raises(NotAllowed, match=words):
            read(place)


def test_what_is_hidden_in_a_home_directory_needs_a_root_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    key, cached = tmp_path / "home/.ssh/id_ed25519", tmp_path / "home/.cache/models/a.txt"
    plain, deeper = tmp_path / "home/data.txt", tmp_path / "home/project/.data/a.txt"
    for file in (key, cached, plain, deeper):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (tmp_path / "home/link.txt").symlink_to(key)
    for root in ("home", "."):
        places = Places.of([tmp_path / root, tmp_path / "home/.cache/models"], [], tmp_path / "state")
        for file in (key, tmp_path / "home/link.txt", tmp_path / "home/.netrc"):
            with pytest.raises(NotAllowed, match=r"hidden files of a home directory.* --data-root "):
                places.check(str(file))
        for file in (plain, deeper, cached):
            places.check(str(file))


def test_roots_do_not_open_what_holds_secrets(tmp_path: Path) -> None:
    with pytest.raises(NotAllowed, match="no job may read it"):
        Places.of([Path("/proc")], [], tmp_path).check("/proc/self/environ")


def test_a_link_that_changes_after_the_look_gains_nothing(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is judged again by where the kernel found it."""
    victim = tmp_path / "data" / "a.txt"
    look = places.path

    def swap(place: str) -> Path:
        found = look(place)
        victim.unlink()
        victim.symlink_to(tmp_path / "secret.txt")
        return found

    monkeypatch.setattr(Places, "path", lambda _, place: swap(place))
    with pytest.raises(NotAllowed, match="--data-root"):
        places.open(str(victim))


def test_pipes_and_folders_are_no_files(places: Places, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data" / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            places.open(str(tmp_path / "data" / name))
        assert not places.is_file(str(tmp_path / "data" / name))


def test_what_jobs_made_is_named_by_job(places: Places, tmp_path: Path) -> None:
    job = tmp_path / "data" / "state" / "jobs" / JOB_ID
    assert places.model(f"job:{JOB_ID}") == job / "model"
    (job / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert places.path(f"job:{JOB_ID}@12") == job / "checkpoints" / "step-00000012"
    other = JOB_ID.replace("7057", "7058").replace("01890", "01891")
    for wrong in (f"job:{JOB_ID}@13", f"job:{other}", "job:../../x", f"job:{JOB_ID}/../x", "job:", f"job:{JOB_ID}@"):
        with pytest.raises(NotAllowed, match="job:"):
            places.path(wrong)
    (job / "checkpoints" / "step-00000014").symlink_to(tmp_path)
    with pytest.raises(NotAllowed, match="leads out of its job's folder"):
        places.path(f"job:{JOB_ID}@14")


def test_every_file_of_a_model_is_looked_at(places: Places, tmp_path: Path) -> None:
    model = tmp_path / "data" / "model"
    (model / "vae").mkdir(parents=True)
    (model / "vae" / "config.json").symlink_to("../../a.txt")  # as caches of models have it
    assert places.model(str(model)) == model
    (model / "vae" / "weights").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(NotAllowed, match=r"vae/weights' leads outside"):
        places.model(str(model))
    export = tmp_path / "data" / "state" / "jobs" / JOB_ID / "model"
    (export / "vae").symlink_to(tmp_path / "data")  # of the model that the job began with
    with pytest.raises(NotAllowed, match=r"weights' leads outside"):
        places.model(f"job:{JOB_ID}")


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Data.Example.org/a/b.txt?x=1", "https://data.example.org"),
        ("https://data.example.org:443/a", "https://data.example.org"),
        ("http://data.example.org.:8080/a", "http://data.example.org:8080"),
        ("http://[fd00::1]:80/a", "http://[fd00::1]"),
        ("s3://bucket/key", "s3://bucket"),
    ],
)
def test_where_a_url_leads(url: str, origin: str) -> None:
    assert url_origin(url) == origin


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://other.example.org/a", "--data-url https://other.example.org"),
        ("http://data.example.org/a", "--data-url http://data.example.org"),
        ("https://data.example.org:8443/a", "--data-url https://data.example.org:8443"),
        ("https://data.example.org@evil.test/a", "remove the credentials"),
        ("https://data.example.org\\@evil.test/a", "backslashes"),
        ("https://169.254.169.254/latest/meta-data", "--data-url"),
        ("simplecache::https://data.example.org/a", "chained protocols"),
        ("zip://a.txt::https://data.example.org/a.zip", "chained protocols"),
        ("https://data.example.org/[x::s3://bucket/a", "chained protocols"),
        ("ftp://data.example.org/a", "protocol 'ftp' is not supported"),
        ("memory://a", "protocol 'memory' is not supported"),
        ("local:///etc/shadow", "protocol 'local' is not supported"),
        ("FILE:///etc/shadow", "protocol 'file' is not supported"),
        ("s3://data/../other/a", "remove `..`"),
        ("az://data/a?/../../other/a", "remove `..`"),
        ("\x01https://data.example.org/a", "one plain URL"),
        ("https:///a", "names no host"),
        ("https://data.example.org:99999/a", "Port out of range"),
    ],
)
def test_other_urls_are_refused(places: Places, url: str, words: str) -> None:
    with pytest.raises(NotAllowed) as refused:
        places.check(url)
    assert words in str(refused.value)
    places.check("https://data.example.org/a/b.txt")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_roots": ("/",)}, "whole machine"),
        ({"data_roots": ("data",)}, "absolute"),
        ({"data_urls": ("https://x.org/path",)}, "scheme and host alone"),
        ({"data_urls": ("ftp://x.org",)}, "protocol 'ftp'"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControllerSettings(redis_url=SecretStr("redis://127.0.0.1:1/0"), **settings)


# -- through the API ---------------------------------------------------------------------------------------------------


async def refusals(api: Api, job: dict[str, Any]) -> dict[str, str]:
    response = await api.client.post("/v1/jobs", json=job)
    if response.status_code == 202:
        return {}
    return {error["setting"]: error["detail"] for error in response.json()["errors"]}


async def test_every_path_of_a_job_is_held_to_the_roots(
    api: Api, job: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (outside / "p.txt").write_text("a secret")
    prompts = str(outside / "p.txt")
    (outside / "adapter_model.safetensors").touch()
    wrong = {
        "model": {"path": str(outside), "adapter": str(outside)},
        "data": {"train": prompts, "validation": "/proc/self/environ"},
    }
    found = await refusals(api, job(**wrong))
    assert set(found) == {"model.path", "model.adapter", "data.train", "data.validation"}
    assert all("--data-root" in found[name] for name in ("model.path", "model.adapter", "data.train"))
    assert "a secret" not in str(found)


@pytest.mark.parametrize("algorithm", ["flow_grpo", "dpo"])
async def test_media_of_the_data_are_held_to_the_roots(
    api: Api, job: Job, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, algorithm: str
) -> None:
    (outside := tmp_path_factory.mktemp("outside") / "1.png").write_bytes(b"secret")
    (tmp_path / "link.png").symlink_to(outside)
    rows: dict[str, dict[str, Any]] = {
        "dpo": {"chosen": "link.png", "rejected": str(outside)},
        "flow_grpo": {"images": ["link.png"]},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", **rows[algorithm]}))
    asked = job(data={"train": str(tmp_path / "rows.jsonl")}, algorithm={"name": algorithm})
    if algorithm == "dpo":
        asked["rewards"] = {}
    found = await refusals(api, asked)
    assert "rows.jsonl:1" in found["data.train"]
    assert "--data-root" in found["data.train"]


async def test_a_submit_fetches_nothing(
    settings: ControllerSettings, api: Api, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote data set is taken unread when its host is listed; the job reads it."""
    url = "http://127.0.0.1:1/prompts.txt"
    assert "--data-url http://127.0.0.1:1" in (await refusals(api, job(data={"train": url})))["data.train"]
    listed = settings.model_copy(update={"data_urls": ("http://127.0.0.1:1",)})
    monkeypatch.setattr(api.services.sources, "places", listed.sources.places)
    assert await refusals(api, job(data={"train": url, "validation": url})) == {}
    with pytest.raises(ValueError, match="cannot be read"):
        open_job(parse(job(data={"train": url})), api.services.sources)


def test_a_running_job_is_held_to_the_settings_of_now(job: Job, tmp_path: Path) -> None:
    spec = parse(job())
    opened = open_job(spec, Sources(Places.of([tmp_path], [], tmp_path / "state")))
    assert ([prompt.text for prompt in opened.training[0]], opened.spec) == (['A red sign that says "K7QX"'], spec)
    with pytest.raises(NotAllowed, match="--data-root"):
        open_job(spec, Sources(Places.of([tmp_path / "elsewhere"], [], tmp_path / "state")))
    export = tmp_path / "state" / "jobs" / JOB_ID / "model"
    export.mkdir(parents=True)
    (export / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    checkpoint = tmp_path / "state" / "jobs" / JOB_ID / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    named = parse(job(model={"path": f"job:{JOB_ID}", "adapter": f"job:{JOB_ID}@4"}))
    opened = open_job(named, Sources(Places.of([tmp_path], [], tmp_path / "state")))
    assert (opened.spec.model.path, opened.spec.model.adapter) == (str(export), str(checkpoint))
    checkpoint.rmdir()  # which a job that has begun does without
    again = open_job(named, Sources(Places.of([tmp_path], [], tmp_path / "state")))
    assert again.spec == opened.spec
    (export / "model_index.json").unlink()
    export.rmdir()
    with pytest.raises(NotAllowed, match="exported no model"):
        open_job(named, Sources(Places.of([tmp_path], [], tmp_path / "state")))
