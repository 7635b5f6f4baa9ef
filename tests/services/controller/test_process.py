"""The controller as a process: port file, bad input over a real socket, SIGTERM, and start again."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.redis.client import connect_sync
from flowfleet.redis.trouble import unfit
from services.controller.__main__ import check_redis
from services.controller.api.server import GRACE_S
from tests.forks import start

Job = Callable[..., dict[str, Any]]
IDLE = "tests.services.controller.serve_idle"


class Launched:
    """A controller and what it writes to its standard error."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = start(command, env=env, output=1, error=self._log.fileno())
        self.pid, self.poll, self.wait = self._process.pid, self._process.poll, self._process.wait
        self.kill, self.send_signal = self._process.kill, self._process.send_signal

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Waits for its end; gives its standard error."""
        self.wait(timeout)
        self._log.seek(0)
        return None, self._log.read().decode()


def launch(module: str, *argv: str, prefix: Sequence[str] = (), **env: str) -> Launched:
    return Launched([*prefix, sys.executable, "-m", module, *argv], {**os.environ, **env})


@contextmanager
def controller(
    module: str, redis_url: str, folder: Path, *, flags: Sequence[str] = (), prefix: Sequence[str] = (), **env: str
) -> Iterator[tuple[Launched, str]]:
    """A process that serves, and its address."""
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    argv = ["--port", "0", "--port-file", str(port_file), "--reward", "ocr=127.0.0.1:1"]
    argv += ["--state-dir", str(folder / "state"), "--data-root", str(folder)]
    process = launch(module, *argv, *flags, prefix=prefix, FLOWFLEET_REDIS_URL=redis_url, **env)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, port_file.read_text()
    finally:
        process.kill()
        process.wait()


def stop(process: Launched) -> tuple[int, str]:
    """Exit code and log after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return ended(process)


def ended(process: Launched) -> tuple[int, str]:
    _, log = process.communicate(timeout=15)
    return process.wait(), log


def test_an_open_stream_does_not_block_shutdown_and_jobs_stay(redis_url: str, tmp_path: Path, job: Job) -> None:
    with controller(IDLE, redis_url, tmp_path) as (process, address):
        with httpx.Client(base_url=f"http://{address}", timeout=20) as client:
            assert client.get("/readyz").status_code == 200
            record = client.post("/v1/jobs", json=job()).json()
            url = f"/v1/jobs/{record['id']}/events"
            with client.stream("GET", url, headers={"Accept": "text/event-stream"}) as stream:
                lines = stream.iter_lines()
                assert next(line for line in lines if line.startswith("data:"))
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert not any(line.startswith("data:") for line in lines)  # it ends, and whole
        code, log = ended(process)
        assert (code, "Traceback" in log) == (0, False), log
        assert time.monotonic() - began < GRACE_S - 1
    with controller(IDLE, redis_url, tmp_path) as (process, address):
        assert httpx.get(f"http://{address}/v1/jobs/{record['id']}").json() == record
        assert stop(process)[0] == 0


def test_an_endless_body_is_answered_and_cut(redis_url: str, tmp_path: Path) -> None:
    with controller(IDLE, redis_url, tmp_path) as (process, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            sent = 0
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
                assert sent < 64 << 20
            answer = connection.recv(4096).decode()
        assert answer.startswith("HTTP/1.1 413")
        assert "application/problem+json" in answer
        assert httpx.get(f"http://{address}/v1/jobs").json()["items"] == []
        code, log = stop(process)
        assert (code, "Traceback" in log) == (0, False), log


def test_the_real_runner_starts_and_stops(redis_url: str, tmp_path: Path) -> None:
    with controller("services.controller", redis_url, tmp_path, FLOWFLEET_API_KEY="k" * 16) as (process, address):
        assert httpx.get(f"http://{address}/readyz").json() == {"status": "ok"}
        assert httpx.get(f"http://{address}/v1/fleet").status_code == 401
        fleet = httpx.get(f"http://{address}/v1/fleet", headers={"X-API-Key": "k" * 16}).json()
        assert fleet == {
            "replicas": [],
            "rewards": {"ocr": ["127.0.0.1:1"]},
            "pools": None,
            "shortages": [],
            "reward_load": {},
        }
        code, log = stop(process)
        assert code == 0, log
        assert all(json.loads(line)["service"] == "controller" for line in log.splitlines())


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--host", "0.0.0.0"], {"FLOWFLEET_REDIS_URL": "redis://127.0.0.1:1/0"}, "set FLOWFLEET_API_KEY"),
        ([], {"FLOWFLEET_REDIS_URL": ""}, "set FLOWFLEET_REDIS_URL"),
        (["--port", "70000"], {}, "not a port"),
    ],
)
def test_refuses_to_start(argv: list[str], env: dict[str, str], message: str) -> None:
    process = launch("services.controller", *argv, **{"FLOWFLEET_API_KEY": "", **env})
    _, log = process.communicate(timeout=60)
    assert (process.returncode, message in log, "Traceback" in log) == (2, True, False), log


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random"])
def test_a_redis_that_evicts_is_refused(redis_url: str, policy: str) -> None:
    check_redis(redis_url)
    with connect_sync(redis_url) as redis:
        redis.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(ValueError, match=f"maxmemory-policy {policy}, .* set it to noeviction"):
                check_redis(redis_url)
            if policy == "volatile-lru":  # a managed one's default
                process = launch("services.controller", FLOWFLEET_REDIS_URL=redis_url)
                _, log = process.communicate(timeout=60)
                assert (process.returncode, "noeviction" in log, "Traceback" in log) == (2, True, False), log
        finally:
            redis.config_set("maxmemory-policy", "noeviction")


def test_a_redis_cluster_is_refused_and_one_that_tells_nothing_is_not() -> None:
    assert "Redis Cluster" in unfit({"cluster_enabled": 1, "maxmemory_policy": "noeviction"})
    assert unfit({}) == ""
