"""A rollout replica as a real process for benchmarks: Redis, `python -m services.rollout`, and a trainer's end of its
weight update."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet.data.blobs import BlobStore
from flowfleet.local.ports import free_ports
from flowfleet.models.registry import adapter_for
from flowfleet.proto import rollout_pb2
from flowfleet.redis import keys
from flowfleet.redis.server import RedisServer
from flowfleet.weights import lora, weights

JOB = "bench"
START_S = 300.0
"""Longest wait for a replica to listen: engines import much."""
LOAD_S = 900.0
"""Longest wait for it to load a model."""


@dataclass(frozen=True)
class Replica:
    address: str
    redis_url: str
    metrics_url: str


def exposition(url: str) -> str:
    """The text of a Prometheus endpoint."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextmanager
def started(*flags: str) -> Iterator[Replica]:
    """A replica with a Redis of its own; both are gone afterwards. Raises RuntimeError with its log if it ends."""
    with tempfile.TemporaryDirectory(prefix="replica-") as scratch:
        directory = Path(scratch)
        server = RedisServer(directory / "redis")
        redis_url = server.start()
        log, port_file, (port,) = directory / "log", directory / "port", free_ports(1)
        argv = [
            sys.executable,
            "-m",
            "services.rollout",
            "--port-file",
            str(port_file),
            "--metrics-port",
            str(port),
            *flags,
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, env={**os.environ, "FLOWFLEET_REDIS_URL": redis_url}, stdout=out, stderr=out
            )
        try:
            address = _listening(process, port_file, log)
            yield Replica(address, redis_url, f"http://127.0.0.1:{port}/metrics")
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            server.stop()


async def publish_adapter(
    stub: Any, blobs: BlobStore, model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec, version: int = 0
) -> None:
    """Runs all four phases of an update with a random adapter; the replica serves it afterwards."""
    state = random_adapter(model, spec)
    ref = await blobs.put(keys.blob(JOB, "adapter"), lora.adapter_to_bytes(state))
    place: dict[str, Any] = {"job_id": JOB, "version": version}
    init = rollout_pb2.InitWeightTransferRequest(job_id=JOB, model=model, lora=spec)
    await stub.InitWeightTransfer(init, timeout=LOAD_S)
    await stub.StartWeightUpdate(rollout_pb2.StartWeightUpdateRequest(**place), timeout=LOAD_S)
    await stub.UpdateWeights(rollout_pb2.UpdateWeightsRequest(**place, adapter=ref), timeout=LOAD_S)
    hashes = weights.tensor_hashes(state.items())
    await stub.FinishWeightUpdate(rollout_pb2.FinishWeightUpdateRequest(**place, hashes=hashes), timeout=LOAD_S)


def random_adapter(model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec) -> dict[str, Tensor]:
    """N(0, 0.01²) in the model's dtype, on the CPU. No weights are read."""
    dtype = weights.dtype_of(model.dtype)
    adapter = adapter_for(model.path).load(model.path, dtype=dtype, components=("transformer",), load_format="empty")
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.01 * torch.randn(parameter.shape, generator=generator)).to(dtype)
        for name, parameter in lora.inject_lora(adapter.experts, spec).items()
    }


def seconds_by_part(exposition: str) -> Mapping[str, float]:
    """A replica's seconds so far in encode, denoise, decode and publish."""
    found = {}
    for line in exposition.splitlines():
        if line.startswith("flowfleet_rollout_seconds_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('part="')[2].partition('"')[0]] = float(value)
    return found


def gauge(exposition: str, name: str) -> float:
    """Value of a gauge without labels; NaN if it does not exist."""
    for line in exposition.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return float("nan")


def _listening(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the replica did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)
    return port_file.read_text()
