"""gRPC services of a test, served in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from flowfleet.proto import models_pb2_grpc, reward_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc
from flowfleet.rpc import endpoint as rpc

SERVICES: dict[type, Any] = {
    models_pb2_grpc.ModelServiceServicer: models_pb2_grpc.add_ModelServiceServicer_to_server,
    reward_pb2_grpc.RewardServiceServicer: reward_pb2_grpc.add_RewardServiceServicer_to_server,
    rollout_pb2_grpc.RolloutServiceServicer: rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
    trainer_pb2_grpc.TrainerServiceServicer: trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
}


def add(server: grpc.aio.Server, *servicers: Any) -> None:
    """Adds servicers of any services of ours, and generic handlers."""
    for servicer in servicers:
        kinds = [kind for kind in SERVICES if isinstance(servicer, kind)]
        for kind in kinds:
            SERVICES[kind](servicer, server)
        if not kinds:
            server.add_generic_rpc_handlers((servicer,))


async def started(*servicers: Any, **options: Any) -> tuple[grpc.aio.Server, str]:
    """Starts a plain server; returns it with its address."""
    server = grpc.aio.server(**options)
    add(server, *servicers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def listening(server: grpc.aio.Server, *servicers: Any, guarded: bool = True) -> AsyncIterator[str]:
    """Serves on a server of `rpc.make_server`; yields its address."""
    add(server, *servicers)
    port = rpc.listen(server, "127.0.0.1", 0, guarded=guarded)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
