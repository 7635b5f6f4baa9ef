"""Event streams: order, resuming, their end, and that they end when the server shuts down."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.controller.api import feed, sse
from services.controller.api.keys import ANYONE
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api, serve
from tests.waiting import until

Job = Callable[..., dict[str, Any]]
STREAM = {"Accept": "text/event-stream"}
KEY = "a-key-of-some-length"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LOOK_S", 0.2)
    monkeypatch.setattr(feed, "REST_S", 0.1)
    monkeypatch.setattr(feed, "CHECK_S", 0.2)


def parse(text: str) -> list[dict[str, Any]]:
    """The events of a stream's text; every block must be an event, a comment or a retry."""
    events = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "data" in fields:
            events.append(json.loads(fields["data"]))
            assert (fields["id"], fields["event"]) == (events[-1]["id"], events[-1]["type"])
        else:
            assert fields.keys() <= {"retry", ""}
    return events


async def ended_job(api: Api, job: Job) -> str:
    job_id = str((await api.submit(job()))["id"])
    await api.store.jobs.set_status(job_id, "running")
    for step in range(300):
        await api.store.events.append(job_id, "phase", {"step": step, "note": "line\nbreak ✓"})
    await api.store.jobs.set_status(job_id, "succeeded")
    return job_id


async def test_the_stream_of_an_ended_job_is_whole_and_ends(api: Api, job: Job) -> None:
    job_id = await ended_job(api, job)
    response = await api.client.get(f"/v1/jobs/{job_id}/events", headers=STREAM)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    assert [e["data"]["step"] for e in events if e["type"] == "phase"] == list(range(300))
    assert [e["data"]["status"] for e in events if e["type"] == "status"] == ["queued", "running", "succeeded"]
    assert events[-1]["data"]["status"] == "succeeded"
    assert events == [event.model_dump(mode="json") for event in await api.store.events.read(job_id, limit=1000)]


async def test_a_stream_goes_on_after_the_last_event_id(api: Api, job: Job) -> None:
    job_id = await ended_job(api, job)
    url = f"/v1/jobs/{job_id}/events"
    whole = parse((await api.client.get(url, headers=STREAM)).text)
    for cut in (0, 7, len(whole) - 2):
        headers = {**STREAM, "Last-Event-ID": whole[cut]["id"]}
        assert parse((await api.client.get(url, headers=headers)).text) == whole[cut + 1 :]
    done = await api.client.get(url, headers={**STREAM, "Last-Event-ID": whole[-1]["id"]})
    assert (done.status_code, done.text) == (204, "")


async def test_pages_give_the_same_events(api: Api, job: Job) -> None:
    job_id = await ended_job(api, job)
    url, cursor, seen = f"/v1/jobs/{job_id}/events", None, []
    while True:
        page = (await api.client.get(url, params={"limit": 90} | ({"cursor": cursor} if cursor else {}))).json()
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == parse((await api.client.get(url, headers=STREAM)).text)


async def test_events_arrive_while_the_job_runs(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    stream = sse.stream(api.services.feed, ANYONE, job_id, None)
    await anext(stream)  # retry
    assert parse(await anext(stream))[0]["data"]["status"] == "queued"
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(2 * feed.REST_S)
    assert not waiting.done()
    await api.store.events.append(job_id, "phase", {"step": 1})
    assert parse(await asyncio.wait_for(waiting, 5))[0]["data"] == {"step": 1}
    await api.store.jobs.set_status(job_id, "failed", "no disk")
    assert [parse(text)[0]["data"]["reason"] async for text in stream] == ["no disk"]


async def test_a_silent_stream_shows_that_it_lives(api: Api, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = str((await api.submit(job()))["id"])
    await asyncio.sleep(2 * feed.REST_S)  # the submit's own notice is handed out
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.01)
    last = (await api.store.events.read(job_id))[-1].id
    stream = sse.stream(api.services.feed, ANYONE, job_id, last)
    assert [await anext(stream) for _ in range(3)] == ["retry: 1000\n\n", ": alive\n\n", ": alive\n\n"]


async def collect(stream: AsyncIterator[str], texts: list[str]) -> None:
    async for text in stream:
        texts.append(text)


async def test_streams_end_when_the_server_closes(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    events, shown = list[str](), list[str]()
    reading = asyncio.ensure_future(collect(sse.stream(api.services.feed, ANYONE, job_id, None), events))
    page = asyncio.ensure_future(collect(sse.page(api.services.feed, ANYONE, None, None), shown))
    await until(lambda: parse("".join(events)) and messages("".join(shown)))
    api.services.closing.set()
    await asyncio.wait_for(asyncio.gather(reading, page), 1)
    assert len(parse("".join(events))) == 1
    assert messages("".join(shown))[-1] == ("end", {"reason": "closing"})


def messages(text: str) -> list[tuple[str, Any]]:
    """Type and data of a page's messages."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def heard(stream: AsyncIterator[str], wanted: str) -> Any:
    """Data of the next message of a type."""
    async with asyncio.timeout(5):
        while True:
            for type_, data in messages(await anext(stream)):
                if type_ == wanted:
                    return data


async def test_a_page_hears_of_jobs_as_they_change(api: Api, job: Job) -> None:
    stream = sse.page(api.services.feed, ANYONE, None, None)
    await heard(stream, "hello")
    first = str((await api.submit(job(name="first")))["id"])
    row = (await heard(stream, "jobs"))["items"][0]
    assert (row["id"], row["status"], row["place"]) == (first, "queued", 0)
    second = str((await api.submit(job(name="second")))["id"])
    row = (await heard(stream, "jobs"))["items"][0]
    assert (row["id"], row["place"]) == (second, 1)
    assert row["waits"] == "the controller takes it up next"
    shown = (await api.client.get(f"/v1/jobs/{second}")).json()
    assert (shown["reason"], shown["place"]) == (row["waits"], 1)
    await api.store.jobs.set_status(first, "running")
    rows = {row["id"]: row for row in (await heard(stream, "jobs"))["items"]}
    assert (rows[first]["place"], rows[second]["place"]) == (None, 0)  # which did not change itself
    await api.store.jobs.set_status(first, "succeeded")
    await heard(stream, "jobs")
    await api.store.removal.remove(first, "was deleted")
    assert (await heard(stream, "jobs"))["gone"] == [first]


async def test_a_page_hears_the_events_of_its_job_and_of_the_fleet(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    stream = sse.page(api.services.feed, ANYONE, job_id, await api.store.events.last_id(job_id))
    await heard(stream, "hello")
    await api.store.events.append(job_id, "phase", {"step": 1})
    assert (await heard(stream, "event"))["data"] == {"step": 1}
    await heard(stream, "fleet")
    api.services.runner.trouble = "Redis takes no writes"  # type: ignore[misc]
    await heard(stream, "fleet")


async def test_one_read_serves_all_that_are_as_far(api: Api, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = str((await api.submit(job()))["id"])
    streams = [sse.stream(api.services.feed, ANYONE, job_id, None) for _ in range(50)]
    for stream in streams:
        await anext(stream)
        await anext(stream)
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(2 * feed.REST_S)
    reads, events = [], api.store.events.read

    async def counted(*args: Any) -> Any:
        reads.append(args)
        return await events(*args)

    monkeypatch.setattr(api.store.events, "read", counted)
    await api.store.events.append(job_id, "phase", {"step": 1})
    texts = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert len(set(texts)) == 1
    assert len(reads) == 1


async def test_a_page_that_reads_too_slowly_starts_over(api: Api) -> None:
    with api.services.feed.watching(ANYONE, page=True) as watcher:
        for number in range(feed.MAX_QUEUED + 1):
            watcher.send(feed.message_of("jobs", {"items": [number]}))
        assert [messages(text) for text in watcher.messages] == [[("reset", {})]]


async def test_pages_read_again_after_an_outage(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = sse.page(api.services.feed, ANYONE, None, None)
    await heard(stream, "hello")
    notices = api.store.notices.after
    monkeypatch.setattr(feed, "RETRY_S", 0.05)

    async def broken(after: str, wait_s: float) -> Any:
        monkeypatch.setattr(api.store.notices, "after", notices)
        raise RedisConnectionError("gone")

    monkeypatch.setattr(api.store.notices, "after", broken)
    await api.store.events.append("any", "phase", {})
    await heard(stream, "reset")


async def test_streams_end_with_the_session_that_opened_them(settings: ControllerSettings, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    file.write_text(f'[ann]\nsha256 = "{digest}"\nmay = "look"\n')
    async with serve(settings.model_copy(update={"keys_file": file})) as api:
        services = api.services
        holder = services.keys.holder(KEY)
        assert holder is not None
        token, _ = await services.sessions.open(holder)
        by_session = await services.sessions.find(token)
        assert by_session is not None
        streams = [sse.page(services.feed, one, None, None) for one in (holder, by_session)]
        for stream in streams:
            await heard(stream, "hello")
        await services.sessions.close(token)
        assert await heard(streams[1], "end") == {"reason": "session"}
        file.write_text("")
        assert await heard(streams[0], "end") == {"reason": "session"}
