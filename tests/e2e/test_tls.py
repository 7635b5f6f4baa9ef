"""A job where every process speaks mutual TLS with the secrets of its kind, and what it makes of strangers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.client.client import Client
from flowfleet.local.secrets import StackSecrets
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.rpc import endpoint as rpc
from flowfleet.rpc.kinds import KINDS
from tests.certificates import NAMES, Authority
from tests.e2e.conftest import ROOT, assert_accounted

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KEY = "a-key-of-sixteen-characters"


@contextmanager
def running(name: str, directory: Path, environment: dict[str, str], *flags: str) -> Iterator[str]:
    """A service of ours; gives host:port."""
    port_file, log = directory / f"{name}.port", directory / f"{name}.log"
    with log.open("wb") as output:
        argv = [sys.executable, "-m", f"services.{name}", "--port-file", str(port_file), *flags]
        process = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=output, stderr=output, cwd=ROOT)
    try:
        deadline = time.monotonic() + 180
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield port_file.read_text()
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def trainers_of(state_dir: Path) -> Iterator[Path]:
    """Ends the trainers in the end, which outlive their controller."""
    try:
        yield state_dir
    finally:
        for record in state_dir.glob("trainers/*.json"):
            with suppress(ProcessLookupError):
                os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


async def test_a_job_runs_under_mutual_tls(
    redis_url: str, tmp_path: Path, small_job: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = Authority()
    files = {kind: ca.issue(tmp_path / kind, *NAMES, f"{kind}.flowfleet") for kind in KINDS}
    secrets = StackSecrets().environments(0)
    environment = {kind: {**secrets[kind], **_shared(files[kind])} for kind in ("controller", "rollout", "reward")}
    for kind in ("controller", "rollout"):
        environment[kind]["FLOWFLEET_REDIS_URL"] = redis_url
    environment["controller"] |= {
        "FLOWFLEET_API_KEY": KEY + "\n",
        "FLOWFLEET_TRAINER_REDIS_URL": redis_url,
        "FLOWFLEET_TRAINER_TLS_DIR": str(files["trainer"]),
    }
    with ExitStack() as stack:
        reward = stack.enter_context(
            running("reward", tmp_path, environment["reward"], "--scorer", "ocr", "--port", "0")
        )
        rollout = stack.enter_context(
            running("rollout", tmp_path, environment["rollout"], "--port", "0", "--device", "cpu")
        )
        state = stack.enter_context(trainers_of(tmp_path / "state"))
        roots = [flag for root in (ROOT, tmp_path.parent) for flag in ("--data-root", str(root))]
        flags = ("--port", "0", "--reward", f"ocr={reward}", "--state-dir", str(state), *roots)
        controller = stack.enter_context(running("controller", tmp_path, environment["controller"], *flags))
        with Client(f"https://{controller}", KEY, ca=files["controller"] / "ca.crt") as client:
            job = client.wait(client.submit(small_job(**{"schedule.steps": 2, "trainer.threads": 2})).id, 480)
        assert_accounted(job, 2 * 4 * 6)

        monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", environment["controller"]["FLOWFLEET_RPC_TOKEN"])
        for address in (reward, rollout):
            code, message = await asked(address)
            assert (code, message) == (grpc.StatusCode.UNAVAILABLE, f"{address} speaks TLS: set FLOWFLEET_TLS_DIR")
        monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(Authority().issue(tmp_path / "other")))
        assert "CERTIFICATE_VERIFY_FAILED" not in (await asked(rollout))[1]
        assert "is refused: unable to get local issuer" in (await asked(rollout))[1]
        monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(files["controller"]))
        assert (await asked(rollout))[0] is grpc.StatusCode.OK
        monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(files["rollout"]))
        assert (await asked(rollout))[0] is grpc.StatusCode.PERMISSION_DENIED
        monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(files["controller"]))
        monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", environment["reward"]["FLOWFLEET_RPC_TOKEN"])
        assert (await asked(rollout))[0] is grpc.StatusCode.UNAUTHENTICATED
        with socket.create_connection(("127.0.0.1", int(controller.rpartition(":")[2])), 10) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(100)


def _shared(files: Path) -> dict[str, str]:
    return {"FLOWFLEET_TLS_DIR": str(files), "FLOWFLEET_DEVICE": "cpu"}


async def asked(address: str) -> tuple[grpc.StatusCode, str]:
    """What the holder of this process's certificates is answered."""
    async with rpc.open_channel(address) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        try:
            await stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
