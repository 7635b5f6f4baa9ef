"""A trainer in two pods of one rank: each pod's torchrun with the command line that the launcher gives it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from flowfleet.job.spec import JobSpec
from flowfleet.process.commands import HEALTH_PORT, METRICS_PORT, POD_PORT, RENDEZVOUS_PORT, trainer_pod_command
from flowfleet.proto import trainer_pb2, trainer_pb2_grpc
from flowfleet.redis.server import free_port
from flowfleet.rpc import endpoint as rpc
from tests.services.trainer.processes import CALL_TIMEOUT_S, Launch, Process
from tests.services.trainer.steps import JOB

HOSTS = ("127.0.0.2", "127.0.0.3")
TOKEN = "token-of-the-test"


class Pod(Process):
    """One pod. What Kubernetes would put into its command line is put in here, and its ports are free ones."""

    def __init__(
        self, index: int, rendezvous_port: int, directory: Path, redis_url: str, flags: tuple[str, ...] = ()
    ) -> None:
        values = {
            "$(JOB_COMPLETION_INDEX)": str(index),
            "$(POD_IP)": HOSTS[index],
            f"--master-port={RENDEZVOUS_PORT}": f"--master-port={rendezvous_port}",
            **{str(port): "0" for port in (POD_PORT, HEALTH_PORT, METRICS_PORT)},
        }
        command = trainer_pod_command(pods=2, ranks_per_pod=1, master=HOSTS[0], drain_s=10)
        for name, value in values.items():
            command = [
                value if part == name else part.replace(name, value) if "$" in name else part for part in command
            ]
        argv = [sys.executable, "-m", "torch.distributed.run", *command, *flags]
        super().__init__(argv, directory, f"pod{index}", redis_url)

    @property
    def agent(self) -> psutil.Process:
        """torchrun: the first process of the container."""
        return psutil.Process(self.process.pid)

    @property
    def rank(self) -> psutil.Process:
        (rank,) = self.agent.children()
        return rank

    def ended_within(self, limit_s: float) -> int:
        """Exit code of the container."""
        return self.process.wait(limit_s)


class Pods:
    """The Job: two pods and a client of rank 0."""

    def __init__(self, launch: Launch, directory: Path, flags: tuple[str, ...] = ()) -> None:
        os.environ.setdefault("FLOWFLEET_RPC_TOKEN", TOKEN)
        port = free_port()
        self.pods: list[Pod] = [launch(Pod, index, port, directory, flags=flags) for index in (0, 1)]
        self.directory = directory
        self.address = f"{HOSTS[0]}:{self.pods[0].address().rpartition(':')[2]}"

    def call(self, method: str, request: Any) -> Any:
        async def call() -> Any:
            async with rpc.open_channel(self.address) as channel:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)

        return asyncio.run(call())

    def configure(self, spec: JobSpec) -> trainer_pb2.ConfigureResponse:
        request = trainer_pb2.ConfigureRequest(
            job_id=JOB, spec_json=spec.model_dump_json(), directory=str(self.directory / "checkpoints")
        )
        response: trainer_pb2.ConfigureResponse = self.call("Configure", request)
        return response

    def codes(self, limit_s: float, after: Callable[[], object]) -> list[int | None]:
        """Exit codes of both pods `limit_s` after something was done; None for one that still runs."""
        after()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(pod.process.poll() is None for pod in self.pods):
            time.sleep(0.05)
        return [pod.process.poll() for pod in self.pods]
