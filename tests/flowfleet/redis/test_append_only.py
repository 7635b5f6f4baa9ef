"""What a Redis lost by a power cut, in both layouts of its append-only file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowfleet.errors import NotFound
from flowfleet.redis.append_only import cut, position
from flowfleet.redis.client import connect_sync
from flowfleet.redis.server import RedisServer


@pytest.fixture(params=["one file", "folder"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    if request.param == "one file":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: install Redis 7")
    return RedisServer(tmp_path / "data")


def test_what_was_written_since_is_lost(server: RedisServer) -> None:
    with connect_sync(server.start()) as client:
        client.set("before", "1")
        earlier = position(server.directory)
        with client.pipeline(transaction=True) as pipe:
            pipe.set("after", "1").set("later", "1").execute()
    server.kill()
    lost = cut(server.directory, earlier)
    assert lost > 0
    with connect_sync(server.start()) as client:
        assert client.keys("*") == [b"before"]
    server.kill()


def test_a_transaction_that_is_cut_in_two_is_lost_as_a_whole(server: RedisServer) -> None:
    with connect_sync(server.start()) as client:
        client.set("before", "1")
        earlier = position(server.directory)
        with client.pipeline(transaction=True) as pipe:
            pipe.set("after", "1").set("later", "1").execute()
    server.kill()
    whole = position(server.directory).size_bytes
    cut(server.directory, type(earlier)(earlier.file, (earlier.size_bytes + whole) // 2))
    with connect_sync(server.start()) as client:
        assert client.keys("*") == [b"before"]
    server.kill()


def test_a_file_that_was_rewritten_cannot_be_cut(server: RedisServer) -> None:
    with connect_sync(server.start()) as client:
        for number in range(100):
            client.set("same", number)
        earlier = position(server.directory)
        client.bgrewriteaof()
        while client.info("persistence")["aof_rewrite_in_progress"]:
            pass
    server.kill()
    with pytest.raises(NotFound, match="rewritten"):
        cut(server.directory, earlier)
    with pytest.raises(NotFound, match="appendonly yes"):
        position(server.directory / "none")
