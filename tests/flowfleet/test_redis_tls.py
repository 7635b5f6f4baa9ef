"""`rediss://` with a private CA against a real server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from flowfleet.redis import client as redis_client
from flowfleet.redis.server import find_redis_server, free_port
from tests.certificates import Authority


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority().issue(tmp_path_factory.mktemp("redis") / "tls")


@pytest.fixture(scope="module")
def url(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    flags = {
        "--port": "0",
        "--tls-port": str(port),
        "--bind": "127.0.0.1 127.0.0.2",
        "--requirepass": "word",
        "--save": "",
    }
    flags |= {"--tls-cert-file": str(files / "tls.crt"), "--tls-key-file": str(files / "tls.key")}
    flags |= {"--tls-ca-cert-file": str(files / "ca.crt"), "--tls-auth-clients": "no"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        argv = [str(find_redis_server()), *(part for flag in flags.items() for part in flag)]
        server = subprocess.Popen(argv, stdout=output, stderr=output, cwd=log.parent)
    deadline = time.monotonic() + 20
    while "Ready to accept connections" not in log.read_text():
        if server.poll() is not None and "directive" in log.read_text():
            pytest.skip("needs a Redis with TLS: put a redis-server that was built with TLS on PATH")
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    yield f"rediss://:word@127.0.0.1:{port}/0"
    server.terminate()
    server.wait()


async def ping_both(url: str) -> None:
    async with redis_client.connect(url) as client:
        assert await client.ping()
    with redis_client.connect_sync(url) as client:
        assert client.ping()


async def test_the_ca_comes_from_the_environment(url: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_REDIS_CA", str(files / "ca.crt"))
    await ping_both(url)


async def test_the_ca_comes_from_the_url(url: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWFLEET_REDIS_CA", raising=False)
    await ping_both(f"{url}?ssl_ca_certs={files / 'ca.crt'}")


async def test_a_server_of_another_ca_or_host_is_refused_at_once(
    url: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retries cannot cure it, so it fails without the half minute that an unreachable server gets."""
    began = time.monotonic()
    monkeypatch.delenv("FLOWFLEET_REDIS_CA", raising=False)
    for ca in (None, Authority().issue(tmp_path / "other") / "ca.crt"):
        if ca is not None:
            monkeypatch.setenv("FLOWFLEET_REDIS_CA", str(ca))
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await ping_both(url)
        with redis_client.connect_sync(url) as client, pytest.raises(redis.ConnectionError, match="VERIFY_FAILED"):
            client.ping()
    monkeypatch.setenv("FLOWFLEET_REDIS_CA", str(files / "ca.crt"))
    with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.2"):
        await ping_both(url.replace("127.0.0.1", "127.0.0.2"))
    assert time.monotonic() - began < 10


def test_a_missing_ca_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_REDIS_CA", "/absent/ca.crt")
    with pytest.raises(ValueError, match=r"FLOWFLEET_REDIS_CA=/absent/ca\.crt: no such file"):
        redis_client.connect("rediss://127.0.0.1:1")
    redis_client.connect("redis://127.0.0.1:1")
