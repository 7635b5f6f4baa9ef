"""A trainer rank of `bench.speed.publish`: the trainer service's worker and, on rank 0, its broadcaster, around random
weights under FSDP2."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.speed.publish.__main__ import MODES, TIMEOUT
from flowfleet.errors import FlowfleetError
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.registry import adapter_for
from flowfleet.proto.rollout_pb2 import Bucket
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest, Replica, TrainStepRequest
from flowfleet.weights import hashing, lora, weights
from services.trainer.commands import Command, Kind
from services.trainer.model.engine import lora_spec
from services.trainer.model.gather import Gather
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import allocate, local, shard_expert
from services.trainer.publishing.broadcast import Broadcaster
from services.trainer.publishing.publisher import update_seconds
from services.trainer.publishing.replicas import ReplicaClient, failures, messages
from services.trainer.runner import Runner
from services.trainer.worker import Published, Worker

JOB = "bench"
DTYPE = torch.bfloat16
RANK = 64
PUBLISH_S = 180.0
"""A broadcast has a sixth of it."""


def make_spec(folder: str, mode: str) -> JobSpec:
    """The job that replicas hear of."""
    trainer = {"mode": mode, "lora": {"rank": RANK, "alpha": 2 * RANK}} if mode == "lora" else {"mode": mode}
    return parse_job(
        {
            "model": {"path": folder, "dtype": weights.dtype_name(DTYPE)},
            "data": {"train": "prompts.txt"},
            "rewards": {"ocr": {}},
            "trainer": trainer,
            "timeouts": {"publish_s": PUBLISH_S},
        }
    )


class Masters:
    """The part of a trainer's engine that publishing needs: random fp32 masters."""

    dtype = DTYPE

    def __init__(self, spec: JobSpec, ranks: Ranks, bucket_bytes: int) -> None:
        is_lora = spec.trainer.mode == "lora"
        folder = spec.model.path
        adapter = adapter_for(folder).load(
            folder, dtype=DTYPE if is_lora else torch.float32, components=("transformer",), load_format="empty"
        )
        experts = dict(adapter.experts)
        for expert in experts.values():
            expert.requires_grad_(not is_lora)
        if is_lora:
            lora.inject_lora(experts, lora_spec(spec), dtype=torch.float32)
        for expert in experts.values():
            shard_expert(expert, ranks, DTYPE)
            allocate(expert, ranks.device)
        named = lora.named_adapter_parameters if is_lora else weights.full_parameters
        self._experts = experts
        self._trained = {name: parameter.detach() for name, parameter in named(experts).items()}
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        torch.manual_seed(ranks.rank)
        for tensor in self._trained.values():
            local(tensor).normal_(std=0.02)

    @property
    def buckets(self) -> list[Bucket]:
        return weights.make_buckets(weights.specs_of(self._trained, DTYPE), self._bucket_bytes)

    def gather(self, *, evaluated: bool = False) -> Gather:
        return Gather(self._trained, DTYPE, self._ranks.device, self._bucket_bytes)

    def step(self) -> None:
        """Changes every weight."""
        for tensor in self._trained.values():
            local(tensor).mul_(1.01)
        devices.synchronize(self._ranks.device)


class Rank(Worker):
    """Executes what rank 0 commands; a step of training is `Masters.step`."""

    def __init__(self, masters: Masters, spec: JobSpec, ranks: Ranks) -> None:
        no_blobs: Any = None
        super().__init__(ranks, no_blobs)
        self._masters = masters
        self.sender_s = 0.0
        job: Any = SimpleNamespace(job_id=JOB, spec=spec, engine=masters)
        self.job = job

    def train(self, request: TrainStepRequest) -> Any:
        self._masters.step()

    def send_weights(self, request: PublishWeightsRequest) -> Published | None:
        start = time.perf_counter()
        published = super().send_weights(request)
        self.sender_s = time.perf_counter() - start
        return published

    def follow(self) -> None:
        """Executes rank 0's commands until it says stop."""
        while (command := Command.from_bytes(self.ranks.broadcast())).kind is not Kind.STOP:
            with suppress(FlowfleetError):  # rank 0 raised it as well
                self.execute(command)


class Watched(Broadcaster):
    """Remembers when it left a group."""

    def __init__(self, worker: Worker, runner: Runner) -> None:
        super().__init__(worker, runner, "127.0.0.1")
        self.left_at: list[float] = []

    def leave(self) -> None:
        self.left_at.append(time.monotonic())
        super().leave()


class Update(NamedTuple):
    """What publishing a version came to."""

    published: Published | None
    """None where no receiver is left."""
    failed: dict[str, str]
    """Error by receiver; all others serve the version."""
    sender_s: float
    verified_s: float
    verified_at: float
    """When the last one verified (time.monotonic), 0 without any."""


class Sender:
    """Rank 0: publishes to receivers by their numbers."""

    def __init__(self, worker: Rank, store: TCPStore) -> None:
        self._worker, self._store = worker, store
        self._runner = Runner(worker, lambda: None)
        self.broadcaster = Watched(worker, self._runner)

    async def publish(self, version: int, receivers: Sequence[int]) -> Update:
        """Changes the weights and publishes them."""
        job = self._worker.job
        assert job is not None, "the worker has it"
        replicas = [Replica(replica_id=str(n), address=self._store.get(f"address/{n}").decode()) for n in receivers]
        deadline = time.monotonic() + PUBLISH_S
        clients = [ReplicaClient(replica, deadline) for replica in replicas]
        failed = messages(await failures(clients, lambda client: client.status()))
        async with self._runner.turn():
            await self._runner.call(Command(Kind.TRAIN, TrainStepRequest()))
            request = PublishWeightsRequest(job_id=JOB, version=version)
            published = await self.broadcaster.publish(job, request, clients, failed)
        live = [client for client in clients if client.replica_id not in failed]
        assert not await failures(live, lambda client: client.status())
        for client in live:
            assert published is not None
            assert client.serves(JOB, published), client.last_status
        verified_at = max((client.verified_at or 0.0 for client in live), default=0.0)
        seconds = self._worker.sender_s, update_seconds(clients)
        await asyncio.gather(*(client.close() for client in clients))
        return Update(published, failed, *seconds, verified_at)

    async def close(self) -> None:
        self.broadcaster.close()
        await self._runner.stop()


async def measure(sender: Sender, num_receivers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round but the first."""
    runs = [await sender.publish(version, range(num_receivers)) for version in range(rounds + 1)][1:]
    if failed := [run.failed for run in runs if run.failed]:
        raise RuntimeError(f"receivers failed: {failed[0]}")
    return {
        "bytes": _bytes(runs[0]),
        "sender_s": [run.sender_s for run in runs],
        "verified_s": [run.verified_s for run in runs],
    }


async def check(sender: Sender, store: TCPStore, num_receivers: int, device: torch.device) -> dict[str, Any]:
    """Receiver 0 dies in version 1. It alone may fail, and all others must serve that version."""
    hashes = check_hashes(device)
    first = await sender.publish(0, range(num_receivers))
    assert not first.failed, first.failed
    update = await sender.publish(1, range(num_receivers))
    assert update.failed.keys() == {"0"}, update.failed
    killed_at = float(store.get("killed"))
    free_s = next(left_at for left_at in sender.broadcaster.left_at if left_at > killed_at) - killed_at
    timeout_s = PUBLISH_S / 6
    assert free_s < timeout_s, f"the sender noticed after {free_s:.1f} s, not within {timeout_s:.0f} s"
    reason = update.failed["0"]
    if num_receivers == 1:
        assert update.published is None
        update = await sender.publish(2, [1])
        assert not update.failed, update.failed
    return {
        "bytes": _bytes(update),
        "free_s": free_s,
        "again_s": update.verified_at - killed_at,
        "checked": [hashes, f"receiver 0 of {num_receivers} killed in a broadcast: {reason}"],
    }


def check_hashes(device: torch.device) -> str:
    """Device and CPU give the same for odd sizes, odd places and several dtypes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 3, 7, 8, 1000, 4099, 70_001, 3_000_001)
    here = [torch.randn(size, generator=generator).to(dtype) for size in sizes for dtype in (DTYPE, torch.float32)]
    there = [tensor.to(device) for tensor in here]
    here, there = ([*part, *(tensor[1:] for tensor in part), part[-1][::3]] for part in (here, there))
    assert torch.equal(hashing.content_sums(there).cpu(), hashing.content_sums(here))
    kernel = "by Triton" if devices.has_triton(device) else "by torch"
    return f"{len(here)} hashes on {device.type} {kernel} equal those of the CPU"


def _bytes(update: Update) -> int:
    assert update.published is not None
    return update.published.bytes


async def lead(worker: Rank, options: argparse.Namespace, store: TCPStore) -> None:
    """Rank 0's part."""
    sender = Sender(worker, store)
    if options.check:
        report = await check(sender, store, options.receivers, worker.ranks.device)
    else:
        report = await measure(sender, options.receivers, options.rounds)
    await sender.close()
    store.set("report", json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-bytes", type=int, default=weights.BUCKET_BYTES)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    ranks, spec = Ranks(), make_spec(options.folder, options.mode)
    worker = Rank(Masters(spec, ranks, options.bucket_bytes), spec, ranks)
    if ranks.rank == 0:
        asyncio.run(lead(worker, options, TCPStore("127.0.0.1", options.port, timeout=TIMEOUT)))
    else:
        worker.follow()
    ranks.close()


if __name__ == "__main__":
    main()
