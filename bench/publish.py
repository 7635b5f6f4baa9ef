"""Measures how long weights take from an FSDP2 trainer to rollouts on other devices, verified.

    python -m bench.publish --ranks 1 2 4        full-size Qwen-Image, random weights; one device more than ranks
    python -m bench.publish --receivers 3        one trainer rank and three receivers, on four devices
    python -m bench.publish --tiny --rounds 2 --bucket-bytes 30000    a tiny model, on the CPU over Gloo

Trainer ranks and receivers are processes. Rank 0 publishes through the trainer service's own broadcaster, and receivers
are the rollout service with a transformer alone. Times are medians of `--rounds` after one round that is not counted.
*sender*: rank 0 gathers, hashes and broadcasts. *verified*: from the last receiver's pause until rank 0 knows that each
receiver verified every parameter.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench import report
from flowfleet.errors import FlowfleetError
from flowfleet.hardware import devices
from flowfleet.hardware.accelerators import visible_devices
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily, adapter_for
from flowfleet.peers import Peers
from flowfleet.proto import rollout_pb2_grpc
from flowfleet.proto.rollout_pb2 import Bucket, ModelSpec
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest, Replica, TrainStepRequest
from flowfleet.rpc import endpoint as rpc
from flowfleet.weights import lora, weights
from recipes.full_size.make_model import write_checkpoint
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.metrics import RolloutMetrics
from services.rollout.server import RolloutService
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

MODES = ("full", "lora")
TIMEOUT = timedelta(minutes=10)
POLL_S = 0.1
JOB = "bench"
DTYPE = torch.bfloat16
RANK = 64
PUBLISH_S = 180.0
"""Limit of one publication; a broadcast has a sixth of it."""

Row = dict[str, float]


def main() -> None:
    parser = report.parser("publish", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of the trainer; one run each")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bucket-bytes", type=int, default=weights.BUCKET_BYTES, help="(the fleet's)")
    options = parser.parse_args()
    needed, found = max(options.ranks) + options.receivers, len(visible_devices())
    if 0 < found < needed:
        parser.error(f"a device per trainer rank and receiver: {needed} are needed, {found} are visible")
    with tempfile.TemporaryDirectory() as directory:
        options.folder = str(write_checkpoint(Path(directory), tiny=options.tiny))
        rows = [measure(mode, ranks, options) for mode in options.modes for ranks in options.ranks]
    report.finish("publish", options, rows, [*rows[0]])


def measure(mode: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a row: medians over rounds."""
    rounds = run(mode, ranks, options)
    size, sender, verified = (
        statistics.median(each[name] for each in rounds) for name in ("bytes", "sender_s", "verified_s")
    )
    return {
        "model": f"{'tiny ' if options.tiny else ''}Qwen-Image, {'LoRA r64' if mode == 'lora' else 'full'}",
        "trainer_ranks": ranks,
        "receivers": options.receivers,
        "gb": size / 1e9,
        "sender_s": sender,
        "verified_s": verified,
        "gb_per_s": size / 1e9 / verified,
    }


def run(mode: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    """Runs trainer ranks and receivers to the end; returns the rounds that rank 0 reports. Raises RuntimeError for a
    process that fails."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port), "WORLD_SIZE": str(ranks)}
    del rendezvous  # frees the port for rank 0
    trainer = [_start(train, {**group, "RANK": str(n)}, n, options, mode, store.port) for n in range(ranks)]
    receivers = [_start(receive, {}, ranks + n, n, store.port) for n in range(options.receivers)]
    try:
        while any(rank.exitcode is None for rank in trainer):
            if failed := [it.exitcode for it in (*trainer, *receivers) if it.exitcode]:
                raise RuntimeError(f"a process ended with {failed[0]}")
            time.sleep(POLL_S)
        return [dict(row) for row in json.loads(store.get("report"))]
    finally:
        for process in (*trainer, *receivers):
            process.kill()
            process.join()


def _start(role: Callable[..., None], environment: dict[str, str], device: int, *arguments: Any) -> BaseProcess:
    environment = {**environment, "LOCAL_RANK": str(device)}
    process = multiprocessing.get_context("spawn").Process(target=_play, args=(environment, role, *arguments))
    process.start()
    return process


def _play(environment: dict[str, str], role: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment)
    role(*arguments)


# A receiver: the rollout service with a transformer alone, outside any fleet -----------------------------------------


class Engine(DiffusersEngine):
    """Only takes weights."""

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        adapter: ModelAdapter = family.load().load(
            model.path, dtype=weights.dtype_of(model.dtype), components=("transformer",), load_format="empty"
        )
        allocate(adapter.transformer, self.device)
        return adapter


class _NoFleet:
    """In place of a replica's entry in the fleet."""

    def changed(self) -> None: ...

    async def tell(self) -> None: ...


def receive(number: int, port: int) -> None:
    """Serves until the process is killed. The trainer reads its address in the store."""
    asyncio.run(_serve(number, TCPStore("127.0.0.1", port, timeout=TIMEOUT)))


async def _serve(number: int, store: TCPStore) -> None:
    engine = Engine(devices.pick_device(int(os.environ["LOCAL_RANK"])), max_batch=1)
    absent: Any = None  # what samples alone need
    fleet: Any = _NoFleet()
    place = {"replica_id": str(number), "incarnation": uuid.uuid4().hex}
    service = RolloutService(engine, absent, absent, absent, RolloutMetrics(), fleet, Peers(absent), **place)
    server = rpc.make_server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)

    async def tell(address: str) -> None:
        store.set(f"address/{number}", address)

    await rpc.serve(server, host="127.0.0.1", health=rpc.HealthState(), on_serving=tell)


# A trainer rank: the service's worker and, on rank 0, its broadcaster, around random weights under FSDP2 -------------


def make_spec(folder: str, mode: str) -> JobSpec:
    """Returns the job that receivers get."""
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
    """Executes rank 0's commands; a step of training is `Masters.step`."""

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


async def publish(worker: Rank, runner: Runner, sender: Broadcaster, version: int, replicas: Sequence[Replica]) -> Row:
    """Changes the weights and publishes them. Raises RuntimeError for a receiver that fails."""
    job = worker.job
    assert job is not None, "the worker has it"
    deadline = time.monotonic() + PUBLISH_S
    clients = [ReplicaClient(replica, deadline) for replica in replicas]
    failed = messages(await failures(clients, lambda client: client.status()))
    async with runner.turn():
        await runner.call(Command(Kind.TRAIN, TrainStepRequest()))
        request = PublishWeightsRequest(job_id=JOB, version=version)
        published = await sender.publish(job, request, clients, failed)
    if failed or published is None:
        raise RuntimeError(f"receivers failed: {failed}")
    assert not await failures(clients, lambda client: client.status())
    assert all(client.serves(JOB, published) for client in clients), [client.last_status for client in clients]
    verified_s = update_seconds(clients)
    await asyncio.gather(*(client.close() for client in clients))
    return {"bytes": published.bytes, "sender_s": worker.sender_s, "verified_s": verified_s}


async def lead(worker: Rank, options: argparse.Namespace, store: TCPStore) -> None:
    """Publishes as rank 0, and reports every round but the first."""
    numbers = map(str, range(options.receivers))
    replicas = [Replica(replica_id=number, address=store.get(f"address/{number}").decode()) for number in numbers]
    runner = Runner(worker, lambda: None)
    sender = Broadcaster(worker, runner, "127.0.0.1")
    rounds = [await publish(worker, runner, sender, version, replicas) for version in range(options.rounds + 1)]
    sender.close()
    await runner.stop()
    store.set("report", json.dumps(rounds[1:]))


def train(options: argparse.Namespace, mode: str, port: int) -> None:
    """Plays the rank that the environment names."""
    ranks, spec = Ranks(), make_spec(options.folder, mode)
    worker = Rank(Masters(spec, ranks, options.bucket_bytes), spec, ranks)
    if ranks.rank == 0:
        asyncio.run(lead(worker, options, TCPStore("127.0.0.1", port, timeout=TIMEOUT)))
    else:
        worker.follow()
    ranks.close()


if __name__ == "__main__":
    main()
