"""A rollout replica as a real process for benchmarks: Redis, `python -m services.rollout`, and a trainer's end of its
weight update."""

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

from bench.process import TAIL, started
from flowfleet.data.blobs import BlobStore
from flowfleet.local.ports import free_ports
from flowfleet.models.registry import adapter_for
from flowfleet.proto import rollout_pb2
from flowfleet.redis import keys
from flowfleet.redis.server import RedisServer
from flowfleet.weights import lora, weights

JOB = "bench"
LOAD_S = 900.0
"""Longest wait for it to load a model."""


@dataclass(frozen=True)
class Replica:
    address: str
    redis_url: str
    metrics_url: str


def exposition(url: str) -> str:
    """The text of a Prometheus endpoint."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextmanager
def running(*flags: str, redis_url: str = "") -> Iterator[Replica]:
    """A replica, with a Redis of its own unless one is given. Both are gone afterwards. Prints its log on a failure."""
    with tempfile.TemporaryDirectory(prefix="replica-") as scratch:
        directory = Path(scratch)
        server = RedisServer(directory / "redis")
        redis_url = redis_url or server.start()
        port_file, (port,) = directory / "port", free_ports(1)
        ports = ["--port-file", str(port_file), "--metrics-port", str(port)]
        try:
            with started(port_file, "services.rollout", *ports, *flags, FLOWFLEET_REDIS_URL=redis_url):
                yield Replica(port_file.read_text(), redis_url, f"http://127.0.0.1:{port}/metrics")
        except BaseException:
            print(port_file.with_suffix(".log").read_text(errors="replace")[-TAIL:], file=sys.stderr)
            raise
        finally:
            server.stop()


async def publish_adapter(
    stub: Any, blobs: BlobStore, model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec, version: int = 0
) -> float:
    """Runs all four phases of an update with a random adapter; the replica serves it then. Returns the seconds."""
    state = random_adapter(model, spec)
    start = time.monotonic()
    ref = await blobs.put(keys.blob(JOB, "adapter"), lora.adapter_to_bytes(state))
    place: dict[str, Any] = {"job_id": JOB, "version": version}
    init = rollout_pb2.InitWeightTransferRequest(job_id=JOB, model=model, lora=spec)
    await stub.InitWeightTransfer(init, timeout=LOAD_S)
    await stub.StartWeightUpdate(rollout_pb2.StartWeightUpdateRequest(**place), timeout=LOAD_S)
    await stub.UpdateWeights(rollout_pb2.UpdateWeightsRequest(**place, adapter=ref), timeout=LOAD_S)
    hashes = weights.tensor_hashes(state.items())
    await stub.FinishWeightUpdate(rollout_pb2.FinishWeightUpdateRequest(**place, hashes=hashes), timeout=LOAD_S)
    return time.monotonic() - start


def lora_spec(model: Path, rank: int, *, merged: bool = False) -> rollout_pb2.LoraSpec:
    """An adapter on all of the family's targets."""
    targets = adapter_for(model).lora_targets
    return rollout_pb2.LoraSpec(rank=rank, alpha=2.0 * rank, target_modules=targets, merged=merged)


def random_adapter(model: rollout_pb2.ModelSpec, spec: rollout_pb2.LoraSpec, std: float = 0.01) -> dict[str, Tensor]:
    """N(0, std²) in the model's dtype, on the CPU, the same in each process. No weights are read."""
    dtype = weights.dtype_of(model.dtype)
    adapter = adapter_for(model.path).load(model.path, dtype=dtype, components=("transformer",), load_format="empty")
    generator = torch.Generator().manual_seed(0)
    return {
        name: (std * torch.randn(parameter.shape, generator=generator)).to(dtype)
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
