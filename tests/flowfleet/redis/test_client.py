"""A Redis killed with -9 in mid-work and restarted: callers see a pause, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from flowfleet.redis import client as redis_client
from flowfleet.redis.server import RedisServer, free_port, server_url

DOWN_S = 1.5
LONG_DOWN_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def restart_later(server: RedisServer, down_s: float = DOWN_S) -> threading.Thread:
    """Kills the server after 0.3 s, starts it again `down_s` later."""

    def work() -> None:
        time.sleep(0.3)
        server.kill()
        time.sleep(down_s)
        server.start()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("down_s", [DOWN_S, pytest.param(LONG_DOWN_S, marks=pytest.mark.long)])
def test_threads_survive_a_killed_server_and_lose_nothing(server: RedisServer, down_s: float) -> None:
    acknowledged, longest = 0, 0.0
    with redis_client.connect_sync(server.url) as client:
        client.ping()
        restart = restart_later(server, down_s)
        while restart.is_alive() or acknowledged == 0:
            start = time.monotonic()
            client.set(f"k{acknowledged}", str(acknowledged))
            assert client.get(f"k{acknowledged}") == str(acknowledged).encode()
            acknowledged += 1
            longest = max(longest, time.monotonic() - start)
        assert longest >= down_s * 0.9  # it was down while we worked
        found = client.mget([f"k{index}" for index in range(acknowledged)])
    assert found == [str(index).encode() for index in range(acknowledged)]


async def test_tasks_survive_a_killed_server_and_lose_nothing(server: RedisServer) -> None:
    """Four writers at once, before, while and after it is down, and a reader that blocks on a stream meanwhile."""

    async def write(client: redis.asyncio.Redis, name: str, count: int) -> None:
        async with client.pipeline(transaction=True) as pipe:
            pipe.set(f"{name}:{count}", count)
            pipe.xadd("stream", {"name": name, "count": count})
            await pipe.execute()

    async def writer(client: redis.asyncio.Redis, name: str, restart: threading.Thread) -> int:
        count, is_last = 1, False
        while not is_last:
            is_last = not restart.is_alive()
            await write(client, name, count)
            count += 1
        return count

    async def reader(client: redis.asyncio.Redis, done: asyncio.Event) -> set[bytes]:
        last, found = b"0", set[bytes]()
        while True:
            final = done.is_set()
            streams: Any = await client.xread({"stream": last}, block=200)
            entries = streams[0][1] if streams else []
            if final and not entries:
                return found
            found |= {fields[b"name"] + b":" + fields[b"count"] for _, fields in entries}
            last = entries[-1][0] if entries else last

    done = asyncio.Event()
    async with redis_client.connect(server.url) as client:
        reading = asyncio.create_task(reader(client, done))
        await asyncio.gather(*(write(client, name, 0) for name in "abcd"))
        restart = restart_later(server)
        counts = await asyncio.gather(*(writer(client, name, restart) for name in "abcd"))
        done.set()
        written = [f"{name}:{i}" for name, count in zip("abcd", counts, strict=True) for i in range(count)]
        assert min(counts) > 1
        assert set(map(str.encode, written)) <= await reading
        assert None not in await client.mget(written)


async def test_a_wrong_password_fails_at_once(server: RedisServer) -> None:
    start = time.monotonic()
    with (
        redis_client.connect_sync(server_url(server.port, "wrong")) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()

    async def ping() -> None:
        async with redis_client.connect(server_url(server.port, "wrong")) as client:
            await client.ping()

    with pytest.raises(redis.AuthenticationError):
        await ping()
    assert time.monotonic() - start < 10


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "_RETRIES", 5)
    monkeypatch.setattr(redis_client, "_BACKOFF_CAP_S", 0.2)


@pytest.mark.usefixtures("quick_retries")
async def test_the_retries_of_command_and_connection_do_not_multiply(server: RedisServer) -> None:
    """5 pauses of 0.05 to 0.2 s: 0.35 to 0.85 s in all; nested six times that, 2.1 s at least."""
    with redis_client.connect_sync(server.url) as client:
        client.ping()
        server.kill()
        start = time.monotonic()
        with pytest.raises(redis.ConnectionError):
            client.set("a", 1)
        assert 0.3 < time.monotonic() - start < 2.0

    async with redis_client.connect(server_url(free_port(), "x")) as client:
        start = time.monotonic()
        with pytest.raises(redis.ConnectionError):
            await client.set("a", 1)
        assert 0.3 < time.monotonic() - start < 2.0


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_REDIS_URL", "redis://:x@127.0.0.1:1/0")
    assert redis_client.redis_url() == "redis://:x@127.0.0.1:1/0"
    monkeypatch.delenv("FLOWFLEET_REDIS_URL")
    with pytest.raises(ValueError, match="set FLOWFLEET_REDIS_URL"):
        redis_client.redis_url()
