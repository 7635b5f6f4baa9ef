from __future__ import annotations

import argparse
import asyncio
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flowfleet.errors import Unavailable
from flowfleet.process import service


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfleet.process.telemetry.configure_logging", lambda *_: None)


def test_the_shared_flags_are_frozen() -> None:
    flags = {flag for action in service.service_parser("x")._actions for flag in action.option_strings}
    assert flags == {"-h", "--help", "--host", "--port", "--port-file", "--metrics-port", "--log-level"}
    options = service.service_parser("x").parse_args([])
    assert vars(options) == {
        "host": "127.0.0.1", "port": 0, "port_file": None, "metrics_port": None, "log_level": "info",
    }  # fmt: skip
    rpc_flags = {flag for action in service.rpc_parser("x")._actions for flag in action.option_strings}
    assert rpc_flags - flags == {"--health-port"}


@pytest.mark.parametrize(
    "argv", [["--port", "65536"], ["--port", "x"], ["--metrics-port", "-1"], ["--log-level", "all"]]
)
def test_wrong_flags_exit_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        service.run_service("x", lambda _: asyncio.sleep(0), service.service_parser("x"), argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "fe80::1", "example.org", "")],
)
def test_beyond_loopback_a_secret_is_required(host: str, loopback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWFLEET_API_KEY", raising=False)
    assert service.is_loopback(host) == loopback
    if loopback:
        service.require_secret(host, service.API_KEY)
        return
    for unset in (None, ""):
        if unset is not None:
            monkeypatch.setenv("FLOWFLEET_API_KEY", unset)
        with pytest.raises(ValueError, match="set FLOWFLEET_API_KEY"):
            service.require_secret(host, service.API_KEY)
    monkeypatch.setenv("FLOWFLEET_API_KEY", "secret")
    service.require_secret(host, service.API_KEY)


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (ValueError("lower x"), 2), (Unavailable("port taken"), 1), (KeyError("bug"), 1)]
)
def test_exit_codes(error: Exception | None, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(options: argparse.Namespace) -> None:
        if error is not None:
            raise error

    assert service.run_service("x", main, service.service_parser("x"), []) == code
    assert ("error: lower x" in capsys.readouterr().err) == (code == 2)


def test_a_reader_finds_no_port_file_or_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "port"
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            if path.exists():
                seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for port in range(50_000, 50_300):
        service.write_port_file(path, f"127.0.0.1:{port}")
    stop.set()
    reader.join()
    assert {len(text) for text in seen} == {len("127.0.0.1:50000")}
    assert [entry.name for entry in tmp_path.iterdir()] == ["port"]
    service.write_port_file(None, "127.0.0.1:1")


def test_the_port_file_of_a_killed_predecessor_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / "port"
    stale.write_text("127.0.0.1:1")

    async def main(options: argparse.Namespace) -> None:
        assert not options.port_file.exists()

    assert service.run_service("x", main, service.service_parser("x"), ["--port-file", str(stale)]) == 0


def test_ipv6_addresses_get_brackets() -> None:
    assert service.format_address("::1", 7) == "[::1]:7"
    assert service.format_address("127.0.0.1", 7) == "127.0.0.1:7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: its kernel does this")
def test_a_process_ends_with_its_parent() -> None:
    child = (
        "import time; from flowfleet.process.service import end_with_parent; end_with_parent(); "
        "print('x', flush=True); time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip() for _ in range(2)}
        pid = int((lines - {"x"}).pop())
        process.kill()
        assert process.stdout.read() == ""  # the pipe closes as the last holder of it ends
    deadline = time.monotonic() + 10
    while not has_ended(pid):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """A zombie has, whether or not anybody reaps it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


FAULTS = """
import resource
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.process.service import keep_freed_memory
{keep}
request = ScoreRequest(samples=[RewardSample(media=bytes(500_000)) for _ in range(16)])
request.SerializeToString()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    request.SerializeToString()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose setting keeps freed memory")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    def faults(keep: str) -> int:
        command = [sys.executable, "-c", FAULTS.format(keep=keep)]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)

    assert 100 * faults("keep_freed_memory()") < faults("")
