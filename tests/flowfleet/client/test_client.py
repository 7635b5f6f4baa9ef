"""The client against a real controller process and a real Redis. The part that runs jobs is played by the test."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.api.jobs import Checkpoint, JobEvent, JobStatus
from flowfleet.api.problems import ApiError
from flowfleet.client.client import Client
from flowfleet.client.connection import DEFAULT_URL
from flowfleet.client.transport import event_data
from flowfleet.filesystem import filesystem_id
from flowfleet.job.spec import parse_job
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import in_store, job_settings

Act = Callable[[Callable[[Store], Any]], Any]


@pytest.fixture
def client(api_url: str) -> Iterator[Client]:
    with Client(api_url) as client:
        yield client


@pytest.fixture
def act(redis_url: str) -> Act:
    """Runs something on the job store."""
    return lambda what: in_store(redis_url, what)


def test_submit_takes_a_file_a_mapping_and_a_spec(client: Client, tmp_path: Path) -> None:
    settings = job_settings(tmp_path, name="by-hand")
    path = tmp_path / "job.toml"
    path.write_text('[model]\npath = "model"\n[rewards.ocr]\n[data]\ntrain = "prompts.txt"\n')

    by_file, by_mapping, by_spec = (client.submit(job) for job in (path, settings, parse_job(settings)))

    assert by_file.spec["model"]["path"] == str(tmp_path / "model")
    assert by_mapping.spec == by_spec.spec == parse_job(settings).model_dump(mode="json")
    assert (by_mapping.status, by_mapping.ended, by_mapping.progress.steps) == ("queued", False, 100)
    assert [job.id for job in client.jobs()] == [by_spec.id, by_mapping.id, by_file.id]
    assert client.job(by_file.id) == by_file


def test_the_same_key_submits_once(client: Client, tmp_path: Path) -> None:
    settings = job_settings(tmp_path)

    assert client.submit(settings, "mine").id == client.submit(settings, "mine").id
    with pytest.raises(ApiError, match="another job") as caught:
        client.submit({**settings, "seed": 7}, "mine")
    assert caught.value.status == 409


def test_a_refused_job_names_every_setting(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        client.submit({**job_settings(tmp_path), "sede": 3, "schedule": {"steps": "many"}})

    assert caught.value.status == 422
    assert {problem.setting for problem in caught.value.problems} == {"sede", "schedule.steps"}
    assert "did you mean seed?" in str(caught.value)


def test_a_job_is_found_by_the_start_of_its_id(client: Client, tmp_path: Path) -> None:
    first, second = (client.submit(job_settings(tmp_path, seed=seed)) for seed in (1, 2))

    assert client.find(first.id) == first
    assert client.find("last") == client.find(first.name) == second
    assert client.find(second.id[:-1]) == second
    with pytest.raises(ApiError, match="2 jobs start with '0'"):
        client.find("0")
    with pytest.raises(ApiError, match="no job has the id or name 'ffff'"):
        client.find("ffff")


def test_wishes(client: Client, act: Act, tmp_path: Path) -> None:
    job = client.submit(job_settings(tmp_path))

    assert client.pause(job.id).desired == "paused"
    assert client.resume(job.id).desired == "running"
    assert client.cancel(job.id).desired == "cancelled"
    with pytest.raises(ApiError, match="being cancelled"):
        client.resume(job.id)
    act(lambda store: store.jobs.set_status(job.id, JobStatus.CANCELLED))
    assert client.wait(job.id, timeout_s=10).status == "cancelled"
    assert list(client.jobs("running")) == []


def test_wait_gives_up_after_its_time(client: Client, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="still queued"):
        client.wait(client.submit(job_settings(tmp_path)).id, timeout_s=0.0)


def test_all_pages_are_read(client: Client, act: Act, tmp_path: Path) -> None:
    job_id = client.submit(job_settings(tmp_path)).id

    async def fill(store: Store) -> None:
        for step in range(230):
            await store.history.put_metrics(job_id, step, {"actor/loss": step / 2})
            await store.samples.put(job_id, SampleRecord(step=step, group=0, index=1, prompt="p", reward=step / 230))
        for step in (4, 8):
            await store.history.add_checkpoint(
                job_id, Checkpoint(step=step, path=f"c/{step}", created_at=datetime.now(UTC))
            )

    act(fill)

    assert [(row.step, row.values["actor/loss"]) for row in client.metrics(job_id)] == [(s, s / 2) for s in range(230)]
    assert [sample.step for sample in client.samples(job_id, order="oldest")] == list(range(230))
    assert next(client.samples(job_id, order="best")).step == 229
    assert [sample.reward for sample in client.samples(job_id, step=23)] == [0.1]
    assert list(client.samples(job_id, purpose="validate")) == []
    assert [checkpoint.path for checkpoint in client.checkpoints(job_id)] == ["c/4", "c/8"]


def test_media(client: Client, redis_url: str, act: Act, tmp_path: Path) -> None:
    from flowfleet.data.blobs import open_blobs
    from flowfleet.redis import keys

    job_id = client.submit(job_settings(tmp_path)).id

    async def fill(store: Store) -> None:
        ref = await open_blobs(store.link.redis).put(keys.blob(job_id, "media"), b"\x89PNG", ttl_s=60)
        place: dict[str, Any] = {"media_uri": ref.uri, "media_size_bytes": ref.size_bytes, "media_sha256": ref.sha256}
        await store.samples.put(job_id, SampleRecord(step=2, group=1, index=0, purpose="validate", prompt="p", **place))

    act(fill)
    (sample,) = client.samples(job_id, purpose="validate")

    assert client.media(job_id, sample) == b"\x89PNG"
    with pytest.raises(ApiError, match="no train sample"):
        client.media(job_id, sample.model_copy(update={"purpose": "train"}))


def test_events_end_with_the_job_and_start_after_an_id(client: Client, act: Act, tmp_path: Path) -> None:
    job_id = client.submit(job_settings(tmp_path)).id

    async def play(store: Store) -> None:
        await store.jobs.update_progress(job_id, step=1, reward=0.25)
        await store.jobs.set_status(job_id, JobStatus.FAILED, "no luck")

    act(play)
    events = list(client.events(job_id))

    assert [event.type for event in events] == ["status", "progress", "status"]
    assert events[1].data == {"step": 1, "reward": 0.25}
    assert (events[-1].data["reason"], events[-1].final) == ("no luck", True)
    assert list(client.events(job_id, after=events[0].id)) == events[1:]
    assert list(client.events(job_id, after=events[-1].id)) == []


def test_events_go_on_after_the_controller_was_killed(
    idle_controller: IdleController, client: Client, act: Act, tmp_path: Path
) -> None:
    job_id = client.submit(job_settings(tmp_path)).id
    events: list[JobEvent] = []
    reader = threading.Thread(target=lambda: events.extend(client.events(job_id)))
    reader.start()
    act(lambda store: store.jobs.update_progress(job_id, step=1))
    time.sleep(0.5)

    idle_controller.kill()
    act(lambda store: store.jobs.update_progress(job_id, step=2))
    idle_controller.start()
    idle_controller.wait()
    act(lambda store: store.jobs.set_status(job_id, JobStatus.SUCCEEDED))
    reader.join(30)

    assert not reader.is_alive()
    assert [event.data.get("step") for event in events] == [None, 1, 2, None]
    assert len({event.id for event in events}) == 4


def test_a_controller_that_restarts_is_asked_again(idle_controller: IdleController, client: Client) -> None:
    before = client.version()
    idle_controller.kill()
    threading.Timer(0.3, idle_controller.start).start()

    assert client.version() == before


def test_nobody_there_is_told_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(ApiError, match=r"no controller answers at http://127\.0\.0\.1:9 .*flowfleet up"):
        next(Client("http://127.0.0.1:9").jobs())
    assert time.monotonic() - begun < 5


def test_fleet(client: Client) -> None:
    fleet = client.fleet()

    assert fleet.rewards == {"ocr": ["a:1"]}
    assert [(replica.replica_id, replica.health, replica.version) for replica in fleet.replicas] == [
        ("rollout-0", "serving", 3)
    ]


def test_url_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    monkeypatch.setenv("FLOWFLEET_URL", "https://fleet.example/")
    monkeypatch.setenv("FLOWFLEET_API_KEY", "sixteen-letters!")
    client = Client(transport=httpx.MockTransport(answer))
    client.version()

    assert str(seen[0].url) == "https://fleet.example/v1/version"
    assert seen[0].headers["authorization"] == "Bearer sixteen-letters!"
    assert not client.on_this_machine
    assert Client(DEFAULT_URL).on_this_machine


def test_an_answer_that_is_no_problem_document_is_told_by_its_status() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(418, text="<html>"))

    with pytest.raises(ApiError, match="418 I'm a teapot"):
        Client("http://proxy", transport=transport).version()


def test_server_sent_events_are_read_as_the_standard_says() -> None:
    stream = (
        "retry: 10\n\n: alive\nid: 7\nevent: status\ndata: a\ndata: b\n\ndata:c\u2028d\n\nid: 9\n\nevent: cut\ndata: x"
    )

    async def data_of(pieces: Iterable[str]) -> list[str]:
        async def come() -> AsyncIterator[str]:
            for piece in pieces:
                yield piece

        return [data async for data in event_data(come())]

    for pieces in ([stream], stream):
        assert asyncio.run(data_of(pieces)) == ["a\nb", "c\u2028d"]


def test_a_controller_behind_a_forwarded_port_does_not_see_our_files() -> None:
    def client(filesystem: str) -> Client:
        answer = {"version": "1", "api": "v1", "filesystem": filesystem}
        return Client(DEFAULT_URL, transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))

    assert client(filesystem_id()).same_files
    assert not client("another").same_files
    assert not Client("https://fleet.example").same_files


@pytest.mark.parametrize("status", [429, 503])
def test_the_pace_that_a_controller_asks_for_is_kept(status: int) -> None:
    times: list[float] = []

    def answer(_: httpx.Request) -> httpx.Response:
        times.append(time.monotonic())
        away = len(times) == 2
        return httpx.Response(status if away else 200, headers={"Retry-After": "0.6"}, json={"items": []})

    client = Client(transport=httpx.MockTransport(answer))
    assert [list(client.jobs()), list(client.jobs())] == [[], []]
    assert times[2] - times[1] >= 0.6  # its own first delay is 0.2


def test_a_first_refusal_for_too_many_requests_is_told_at_once() -> None:
    """It may be for wrong keys, which no waiting mends."""
    answers = httpx.MockTransport(lambda _: httpx.Response(429, headers={"Retry-After": "30"}, json={"detail": "slow"}))
    with pytest.raises(ApiError, match="slow"):
        list(Client(transport=answers).jobs())
