"""Event streams: order, resuming, their end, and that they end when the server shuts down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.controller.api import sse
from tests.services.controller.conftest import Api

pytestmark = pytest.mark.anyio
Job = Callable[..., dict[str, Any]]
STREAM = {"Accept": "text/event-stream"}


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
    await api.store.set_status(job_id, "running")
    for step in range(300):
        await api.store.append_event(job_id, "phase", {"step": step, "note": "line\nbreak ✓"})
    await api.store.set_status(job_id, "succeeded")
    return job_id


async def test_the_stream_of_an_ended_job_is_whole_and_ends(api: Api, job: Job) -> None:
    job_id = await ended_job(api, job)
    response = await api.client.get(f"/v1/jobs/{job_id}/events", headers=STREAM)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    assert [e["data"]["step"] for e in events if e["type"] == "phase"] == list(range(300))
    assert [e["data"]["status"] for e in events if e["type"] == "status"] == ["queued", "running", "succeeded"]
    assert events[-1]["data"]["status"] == "succeeded"
    assert events == [event.model_dump(mode="json") for event in await api.store.events(job_id, limit=1000)]


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
    stream = sse.stream(api.store, job_id, None, asyncio.Event())
    await anext(stream)  # retry
    assert parse(await anext(stream))[0]["data"]["status"] == "queued"
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(2 * sse.POLL_S)
    assert not waiting.done()
    await api.store.append_event(job_id, "phase", {"step": 1})
    assert parse(await asyncio.wait_for(waiting, 5))[0]["data"] == {"step": 1}
    await api.store.set_status(job_id, "failed", "no disk")
    assert [parse(text)[0]["data"]["reason"] async for text in stream] == ["no disk"]


async def test_a_silent_stream_shows_that_it_lives(api: Api, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.0)
    job_id = str((await api.submit(job()))["id"])
    last = (await api.store.events(job_id))[-1].id
    stream = sse.stream(api.store, job_id, last, asyncio.Event())
    assert [await anext(stream) for _ in range(3)] == ["retry: 1000\n\n", ": alive\n\n", ": alive\n\n"]


async def test_streams_end_when_the_server_closes(api: Api, job: Job) -> None:
    job_id = str((await api.submit(job()))["id"])
    closing = asyncio.Event()

    async def collect(stream: AsyncIterator[str]) -> str:
        return "".join([text async for text in stream])

    reading = asyncio.ensure_future(collect(sse.stream(api.store, job_id, None, closing)))
    await asyncio.sleep(0.1)
    closing.set()
    assert len(parse(await asyncio.wait_for(reading, 1))) == 1
