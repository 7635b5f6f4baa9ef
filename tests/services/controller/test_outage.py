"""Redis dies and comes back: requests wait for it, streams continue, nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from flowfleet.redis.server import RedisServer
from services.controller.api import sse
from services.controller.api.keys import ANYONE
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import serve

Job = Callable[..., dict[str, Any]]


async def test_a_killed_redis_is_a_pause(tmp_path: Path, job: Job) -> None:
    server = RedisServer(tmp_path / "redis")
    settings = ControllerSettings(
        redis_url=SecretStr(server.start()),
        state_dir=tmp_path / "state",
        data_roots=(tmp_path,),
        rewards={"ocr": "127.0.0.1:1"},
    )
    try:
        async with serve(settings) as api:
            first = await api.submit(job())
            stream = sse.stream(api.services.feed, ANYONE, first["id"], None)
            assert [await anext(stream) for _ in range(2)]
            waiting = asyncio.ensure_future(anext(stream))
            server.kill()

            assert (await api.client.get("/readyz")).status_code == 200, "its Service keeps it, to say what is wrong"
            submitting = asyncio.ensure_future(api.submit(job(name="second")))
            asking = asyncio.ensure_future(api.client.post(f"/v1/jobs/{first['id']}/pause"))
            await asyncio.sleep(0.5)
            assert not submitting.done()

            await asyncio.to_thread(server.start)
            second = await submitting
            assert (await asking).json()["desired"] == "paused"
            assert '"action":"pause"' in await asyncio.wait_for(waiting, 10)
            assert [item["id"] for item in (await api.client.get("/v1/jobs")).json()["items"]] == [
                second["id"],
                first["id"],
            ]
            kinds = [event.type for event in await api.store.events.read(first["id"])]
            assert kinds == ["status", "request"]
            assert (await api.client.get("/readyz")).status_code == 200
    finally:
        server.kill()
