"""`python -m services.rollout`: one replica. Needs FLOWFLEET_REDIS_URL; see `--help` for the flags."""

from __future__ import annotations

import argparse
import logging
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import redis.asyncio
import torch

from flowfleet import devices, redis_client, rpc
from flowfleet.blobs import open_blobs
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.service import run_service, service_parser
from services.rollout.engines.base import RolloutEngine
from services.rollout.metrics import RolloutMetrics
from services.rollout.publisher import Publisher
from services.rollout.registration import Membership, ReplicaRecord
from services.rollout.server import RolloutService

SERVICE = "flowfleet.v1.RolloutService"
_WATCH_EVERY_S = 1.0
_ENCODING_THREADS = 4

log = logging.getLogger(__name__)


def main() -> int:
    return run_service("rollout", serve, parser())


def parser() -> argparse.ArgumentParser:
    flags = service_parser("Samples groups of images under a verified policy version, and takes new weights.")
    flags.add_argument("--replica-id", help="name in the fleet; default: its address")
    flags.add_argument("--advertise", help="host:port at which the fleet reaches it; default: the address it binds")
    flags.add_argument("--engine", choices=("diffusers",), default="diffusers")
    flags.add_argument("--device", default="auto", help='"auto", "cpu", "cuda:0", …')
    flags.add_argument("--max-batch", type=_positive, default=256, help="most rows of one forward")
    flags.add_argument("--threads", type=_positive, help="CPU threads of the engine; default: torch's")
    flags.add_argument("--model", help="directory of a diffusers pipeline to load at start")
    flags.add_argument("--dtype", default="bfloat16", help="of --model; jobs name their own")
    flags.add_argument("--drain-s", type=float, default=600.0, help="longest wait for running work on SIGTERM")
    flags.add_argument("--stall-s", type=float, default=900.0, help="without progress for so long it is unhealthy")
    return flags


async def serve(options: argparse.Namespace) -> None:
    """Runs a replica until SIGTERM, which drains it."""
    client = redis_client.connect(redis_client.redis_url())
    engine = make_engine(options)
    try:
        if options.model:
            await engine.prepare(rollout_pb2.ModelSpec(path=options.model, dtype=options.dtype), None)
        with ThreadPoolExecutor(_ENCODING_THREADS, "encode") as pool:
            await _serve(options, client, engine, pool)
    finally:
        await engine.close()
        await client.aclose()


async def _serve(
    options: argparse.Namespace, client: redis.asyncio.Redis, engine: RolloutEngine, pool: ThreadPoolExecutor
) -> None:
    incarnation = uuid.uuid4().hex
    replica_id = options.replica_id or _default_id(options, incarnation)
    blobs = open_blobs(client)
    publisher = Publisher(client, blobs, replica_id, pool)
    service = RolloutService(engine, publisher, blobs, RolloutMetrics(), replica_id=replica_id, incarnation=incarnation)
    server, health = rpc.make_server(), rpc.HealthState(SERVICE)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)
    membership = Membership(client, engine, health, stall_s=options.stall_s)

    async def join(address: str) -> None:
        await membership.join(ReplicaRecord(replica_id, options.advertise or address, incarnation, options.model or ""))

    async def drain() -> None:
        await membership.leave()
        if unfinished := await service.drain(options.drain_s):
            log.warning("%d samples were still running after %.0f s", unfinished, options.drain_s)
        service.close()

    await rpc.serve(
        server,
        host=options.host,
        port=options.port,
        port_file=options.port_file,
        health=health,
        on_serving=join,
        on_drain=drain,
    )


def make_engine(options: argparse.Namespace) -> RolloutEngine:
    """The engine of the flags; its libraries are imported only now."""
    from services.rollout.engines.diffusers import DiffusersEngine

    device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    return DiffusersEngine(device, max_batch=options.max_batch, threads=options.threads)


def _default_id(options: argparse.Namespace, incarnation: str) -> str:
    """The same after a restart if the port is."""
    return f"{options.host}-{options.port}".replace(":", ".") if options.port else incarnation


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
