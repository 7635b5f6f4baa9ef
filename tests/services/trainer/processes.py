"""Trainers and replicas as processes of their own, with stubs that speak to them."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from flowfleet.job.spec import JobSpec
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.forks import start
from tests.services.trainer.steps import JOB

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 120.0


class Process:
    """A service started with `--port-file`."""

    def __init__(self, command: list[str], directory: Path, name: str, redis_url: str, ranks: int = 0) -> None:
        self.log = directory / f"{name}.log"
        self._port_file = directory / f"{name}.port"
        self._port_file.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "FLOWFLEET_REDIS_URL": redis_url,
            "OMP_NUM_THREADS": "1",
            "FLOWFLEET_DEVICE": "cpu",
        }
        with self.log.open("ab") as output:
            argv = [*command, "--port-file", str(self._port_file)]
            self.process = start(argv, env=environment, output=output.fileno(), session=True, ranks=ranks)

    def address(self) -> str:
        """Waits until it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return self._port_file.read_text()

    def kill(self) -> None:
        """kill -9 on all of it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> int:
        """SIGTERM to all of it, as the launcher does; the exit code."""
        os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(60)


class Trainer(Process):
    """One trainer of `world_size` ranks, bound to `JOB` by `configure`."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        redis_url: str,
        *,
        name: str = "trainer",
        flags: tuple[str, ...] = (),
        module: str = "services.trainer",
    ) -> None:
        self.spec = spec
        self.directory = directory
        ranks = spec.trainer.world_size
        super().__init__([sys.executable, "-m", module, *flags], directory, name, redis_url, ranks if ranks > 1 else 0)
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        if self._stub is None:
            self._stub = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel(self.address()))
        return self._stub

    def configure(self, directory: str = "checkpoints") -> trainer_pb2.ConfigureResponse:
        request = trainer_pb2.ConfigureRequest(
            job_id=JOB, spec_json=self.spec.model_dump_json(), directory=str(self.directory / directory)
        )
        return self.stub.Configure(request, timeout=CALL_TIMEOUT_S)

    def train(self, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepResponse:
        return self.stub.TrainStep(request, timeout=CALL_TIMEOUT_S)

    def save(self) -> trainer_pb2.SaveCheckpointResponse:
        return self.stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(job_id=JOB), timeout=CALL_TIMEOUT_S)

    def export(self, directory: Path) -> Path:
        request = trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(directory))
        return Path(self.stub.ExportModel(request, timeout=CALL_TIMEOUT_S).path)

    def status(self) -> trainer_pb2.TrainerStatus:
        return self.stub.GetStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=CALL_TIMEOUT_S)

    def publish(self, version: int, *replicas: "Replica") -> trainer_pb2.PublishWeightsResponse:
        request = trainer_pb2.PublishWeightsRequest(job_id=JOB, version=version)
        request.replicas.extend(trainer_pb2.Replica(replica_id=r.name, address=r.address()) for r in replicas)
        return self.stub.PublishWeights(request, timeout=CALL_TIMEOUT_S)


class Replica(Process):
    """See `tests/services/trainer/replica.py`."""

    def __init__(self, directory: Path, redis_url: str, name: str, fault: str = "none") -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.services.trainer.replica", "--fault", fault]
        super().__init__(command, directory, name, redis_url)

    def status(self) -> rollout_pb2.RolloutStatus:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(self.address()))
        return stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=CALL_TIMEOUT_S)


Launch = Callable[..., Any]
"""(kind, *args, **kwargs) → the started process, killed when the test ends."""
