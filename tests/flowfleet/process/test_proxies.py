"""No proxy between here and loopback, under all proxy variables pointing to a dead port."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from flowfleet.local.plan import Kind, Plan, ProcessPlan
from flowfleet.local.supervision.health import is_alive
from flowfleet.process.forks import fixed_digest
from flowfleet.process.proxies import LOOPBACK, direct_to_loopback
from flowfleet.prompts import stores
from flowfleet.prompts.columns import Columns
from tests.proxies import DEAD, PROXIES


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A site of this machine with a prompt file, while all proxies are dead."""
    for name in PROXIES:
        monkeypatch.setenv(name, DEAD)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a.txt").write_text("a cat\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.txt"
        server.shutdown()


def test_a_service_is_seen_to_serve(site: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        process = ProcessPlan("rollout-0", Kind.ROLLOUT, (), f"127.0.0.1:{port}")
        assert is_alive(process, Plan((process,), "", ""), 8.0)
    finally:
        server.stop(None)


def test_prompts_of_this_machine_are_read(site: str) -> None:
    (prompt,) = stores.read_prompts(site, Columns())
    assert prompt.text == "a cat"


def test_libraries_that_read_the_variables_go_directly(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(site)
    for name, value in direct_to_loopback(dict.fromkeys(PROXIES, DEAD)).items():
        monkeypatch.setenv(name, value)
    assert httpx.get(site).text == "a cat\n"
    with urllib.request.build_opener().open(site, timeout=5) as answer:
        assert answer.read() == b"a cat\n"


def test_what_is_excepted_already_stays() -> None:
    assert direct_to_loopback({"PATH": "/bin", "NO_PROXY": "a"}) == {}
    assert direct_to_loopback({"http_proxy": "", "HTTPS_PROXY": ""}) == {}
    assert direct_to_loopback({"http_proxy": DEAD, "NO_PROXY": "*"}) == {}
    known = direct_to_loopback({"http_proxy": DEAD, "NO_PROXY": "fleet.example, localhost"})
    assert known["no_proxy"] == known["NO_PROXY"] == "fleet.example,localhost,127.0.0.1,::1"
    assert set(LOOPBACK) < {*known["no_proxy"].split(",")}


def test_proxies_keep_no_process_from_being_forked() -> None:
    assert fixed_digest({"PATH": "/bin"}) == fixed_digest({"PATH": "/bin", **dict.fromkeys(PROXIES, DEAD)})
