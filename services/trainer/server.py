"""TrainerService on rank 0: checks requests against the record, then has all ranks execute them."""

import time
from collections.abc import Callable
from typing import Any

from flowfleet.errors import Conflict
from flowfleet.process.service import check_address
from flowfleet.process.telemetry import JobMetrics
from flowfleet.proto import trainer_pb2, trainer_pb2_grpc
from services.trainer.commands import Command, Kind
from services.trainer.publishing.publisher import Publisher
from services.trainer.runner import Runner
from services.trainer.step.requests import check_directory
from services.trainer.worker import Job, Worker, step_response


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """Wires worker, runner and publisher to the calls of trainer.proto."""

    def __init__(
        self,
        worker: Worker,
        runner: Runner,
        publisher: Publisher,
        metrics: JobMetrics,
        incarnation: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._runner = runner
        self._publisher = publisher
        self._metrics = metrics
        self._incarnation = incarnation
        self._on_end = on_end
        self._last_call = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds without a call and without work."""
        return 0.0 if self._runner.busy else time.monotonic() - self._last_call

    async def Configure(self, request: trainer_pb2.ConfigureRequest, context: Any) -> trainer_pb2.ConfigureResponse:
        self._touch()
        check_directory(request.directory, request.job_id)
        response: trainer_pb2.ConfigureResponse = await self._command(Kind.CONFIGURE, request)
        return response

    async def TrainStep(self, request: trainer_pb2.TrainStepRequest, context: Any) -> trainer_pb2.TrainStepResponse:
        self._touch()
        return await self._runner.once(("train", request.job_id, request.step), lambda: self._train(request))

    async def PublishWeights(
        self, request: trainer_pb2.PublishWeightsRequest, context: Any
    ) -> trainer_pb2.PublishWeightsResponse:
        self._touch()
        job = self._job(request.job_id)
        for replica in request.replicas:
            check_address(replica.address)
        limit = job.spec.timeouts.publish_s
        left = min(limit, context.time_remaining() or limit)
        key = "publish", request.SerializeToString(deterministic=True)
        return await self._runner.once(key, lambda: self._publisher.publish(request, left))

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        self._touch()
        self._job(request.job_id)
        response: trainer_pb2.SaveCheckpointResponse = await self._command(Kind.SAVE, request)
        return response

    async def ExportModel(
        self, request: trainer_pb2.ExportModelRequest, context: Any
    ) -> trainer_pb2.ExportModelResponse:
        self._touch()
        self._job(request.job_id)
        check_directory(request.directory, request.job_id)
        response: trainer_pb2.ExportModelResponse = await self._command(Kind.EXPORT, request)
        return response

    async def GetStatus(self, request: trainer_pb2.GetTrainerStatusRequest, context: Any) -> trainer_pb2.TrainerStatus:
        self._touch()
        job = self._worker.job
        state = trainer_pb2.TRAINER_STATE_UNCONFIGURED if job is None else trainer_pb2.TRAINER_STATE_READY
        return trainer_pb2.TrainerStatus(
            state=trainer_pb2.TRAINER_STATE_BUSY if self._runner.busy else state,
            job_id="" if job is None else job.job_id,
            applied_steps=0 if job is None else job.record.version,
            world_size=self._worker.ranks.world_size,
            incarnation=self._incarnation,
            device=str(self._worker.ranks.device),
            ranks=self._worker.ranks.beats.progress(),
        )

    async def End(self, request: trainer_pb2.EndTrainerRequest, context: Any) -> trainer_pb2.EndTrainerResponse:
        self._on_end()
        return trainer_pb2.EndTrainerResponse()

    async def _train(self, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepResponse:
        async with self._runner.turn():
            job = self._job(request.job_id)
            applied = job.record.version
            if request.step < applied:
                job.record.check_replay(request)
                return step_response(job.record, request.step, replayed=True)
            if request.step > applied:
                raise Conflict(f"step {request.step} cannot be applied: this trainer expects step {applied}")
            response: trainer_pb2.TrainStepResponse = await self._runner.call(Command(Kind.TRAIN, request))
        self._metrics.observe(request.job_id, response.metrics)
        return response

    async def _command(self, kind: Kind, request: Any) -> Any:
        command = Command(kind, request)

        async def run() -> Any:
            async with self._runner.turn():
                return await self._runner.call(command)

        return await self._runner.once(command.to_bytes(), run)

    def _job(self, job_id: str) -> Job:
        job = self._worker.job
        if job is None or job.job_id != job_id:
            owner = "no job yet" if job is None else f"job {job.job_id}"
            raise Conflict(f"this trainer belongs to {owner}, not to job {job_id}: call Configure first")
        return job

    def _touch(self) -> None:
        self._last_call = time.monotonic()
