"""A replica's life: parts made and wired, served until SIGTERM, drained, closed."""

import argparse
import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis.asyncio
import torch

from flowfleet import hub, plugins
from flowfleet.hardware import devices
from flowfleet.job.fingerprints import fingerprint
from flowfleet.peers import Peers
from flowfleet.process.pulse import Pulse
from flowfleet.process.service import serving, stop_on_signals
from flowfleet.proto import models_pb2_grpc, rollout_pb2
from flowfleet.redis import client as redis_client
from flowfleet.rpc import endpoint as rpc
from services.rollout.engines.base import RolloutEngine
from services.rollout.replica import Replica

SERVICE = "flowfleet.v1.RolloutService"
_MEDIA_THREADS = 4
_WILDCARDS = ("0.0.0.0", "::")

log = logging.getLogger(__name__)


async def serve(options: argparse.Namespace) -> None:
    """Runs a replica until SIGTERM, which drains it. Raises ValueError for flags and settings that cannot work."""
    if options.host in _WILDCARDS and not options.advertise:
        raise ValueError(f"--host {options.host} is not an address of this replica: give --advertise host:port")
    plugins.load()
    client = redis_client.connect(redis_client.redis_url())
    engine = make_engine(options)
    try:
        with ThreadPoolExecutor(_MEDIA_THREADS, "media") as pool:
            await _serve(options, client, engine, pool)
    finally:
        await engine.close()
        await client.aclose()


async def _serve(
    options: argparse.Namespace, client: redis.asyncio.Redis, engine: RolloutEngine, pool: ThreadPoolExecutor
) -> None:
    incarnation = uuid.uuid4().hex
    # the same after a restart if the port is
    name = f"{options.host}-{options.port}".replace(":", ".") if options.port else incarnation
    replica_id = options.replica_id or name
    server, health, stop = rpc.make_server(), rpc.HealthState(SERVICE), asyncio.Event()
    peers = Peers(client, Path(options.model_copies, replica_id) if options.model_copies else None)
    models_pb2_grpc.add_ModelServiceServicer_to_server(peers, server)
    replica = Replica(
        engine,
        client,
        pool,
        server,
        health,
        peers,
        replica_id=replica_id,
        incarnation=incarnation,
        on_replaced=_end_at_once,
    )

    async def join(address: str) -> None:
        """Loads the model first: meanwhile peers are answered, but not the fleet."""
        address = options.advertise or address
        peers.address = address if options.model_copies else ""
        if options.model:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end_at_once)
            folder = await peers.model(options.model)
            is_named = hub.name_of(options.model) is not None
            found = "" if is_named else await asyncio.to_thread(fingerprint, folder)
            await engine.prepare(rollout_pb2.ModelSpec(path=str(folder), dtype=options.dtype, fingerprint=found), None)
            stop_on_signals(stop)
        await replica.join(address, options.model or "", options.pool)

    def leave() -> Awaitable[object]:
        return asyncio.gather(replica.leave(options.drain_s), peers.close())

    try:
        await rpc.serve(server, **serving(options), health=health, on_serving=join, on_drain=leave, stop=stop)
    finally:
        await server.stop(None)


def make_engine(options: argparse.Namespace) -> RolloutEngine:
    """The engine of the flags; its libraries are imported only now."""
    try:
        device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    except RuntimeError as error:
        raise ValueError(f"--device {options.device}: {error}") from None
    devices.tell_start()
    if options.sequence_parallel_size > 1 and options.engine != "diffusers":
        raise ValueError(
            f"--sequence-parallel-size {options.sequence_parallel_size}: the engine {options.engine} samples on one "
            "device: give --engine diffusers, or --sequence-parallel-size 1"
        )
    if options.adapter_slots and (options.engine != "diffusers" or options.sequence_parallel_size > 1):
        raise ValueError(
            f"--adapter-slots {options.adapter_slots}: only --engine diffusers on one device samples for several jobs "
            "at once: leave it out, or give 0"
        )
    settings: dict[str, Any] = {"max_batch": options.max_batch, "threads": options.threads}
    settings["pulse"] = Pulse(options.hang_s, options.stall_s, shared=True)
    if options.engine == "vllm-omni":
        from services.rollout.engines.vllm_omni.engine import VllmOmniEngine

        return VllmOmniEngine(device, attention_backend=options.attention_backend, **settings)
    if options.engine == "vllm":
        from services.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(device, **settings)
    if options.engine == "transformers":
        from services.rollout.engines.transformers import TransformersEngine

        return TransformersEngine(device, **settings)
    if options.sequence_parallel_size > 1:
        from services.rollout.engines.parallel import ParallelEngine

        return ParallelEngine(device, size=options.sequence_parallel_size, on_lost=_end_at_once, **settings)
    from services.rollout.engines.diffusers import DiffusersEngine

    engine = DiffusersEngine(device, **settings)
    if options.adapter_slots is not None:
        engine.slots = options.adapter_slots
    return engine


def _end_at_once() -> None:
    """Ends this process at once. Its unfinished samples are requested again, from its successor."""
    logging.shutdown()
    os._exit(1)
