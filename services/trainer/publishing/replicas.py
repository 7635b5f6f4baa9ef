"""Rollout replicas as the publisher calls them: every call with a deadline, every failure a sentence."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio

from flowfleet.job.spec import JobSpec
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.proto.trainer_pb2 import Replica
from flowfleet.rpc import endpoint as rpc
from services.trainer.model.engine import lora_spec, model_spec
from services.trainer.worker import Published

STATUS_TIMEOUT_S = 10.0

T = TypeVar("T")


class ReplicaFailure(Exception):
    """A replica did not do its part. A victim was stopped by the failure of another member of its transfer group."""

    def __init__(self, message: str, *, is_victim: bool = False) -> None:
        super().__init__(message)
        self.is_victim = is_victim


class ReplicaClient:
    """Client of one replica, usable until `deadline` (time.monotonic). Each method raises ReplicaFailure."""

    def __init__(
        self, replica: Replica, deadline: float, attempt: int = 0, fingerprint: str = "", threads: int = 0
    ) -> None:
        """`fingerprint`: of the model's folder when the job began; `threads`: as in ModelSpec."""
        self.replica_id = replica.replica_id
        self.last_status = rollout_pb2.RolloutStatus()
        self.drain_s = 0.0
        """Seconds that the replica took to finish its running samples."""
        self.paused_at: float | None = None
        """Time at which the replica first stood still for the update (time.monotonic)."""
        self.verified_at: float | None = None
        self._deadline = deadline
        self._attempt, self._fingerprint, self._threads = attempt, fingerprint, threads
        self._channel = rpc.open_channel(replica.address)
        self._stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> rollout_pb2.RolloutStatus:
        request = rollout_pb2.GetRolloutStatusRequest()
        self.last_status = await self._call(self._stub.GetStatus, request, timeout_s)
        return self.last_status

    async def init(
        self, job_id: str, spec: JobSpec, group: rollout_pb2.TransferGroup | None = None
    ) -> rollout_pb2.InitWeightTransferResponse:
        """Binds it to the job; with a group, joins that."""
        model = model_spec(spec, self._fingerprint, self._threads)
        lora = lora_spec(spec) if spec.trainer.mode == "lora" else None
        request = rollout_pb2.InitWeightTransferRequest(
            job_id=job_id, model=model, lora=lora, group=group, attempt=self._attempt
        )
        response: rollout_pb2.InitWeightTransferResponse = await self._call(self._stub.InitWeightTransfer, request)
        return response

    async def start(self, job_id: str, version: int, *, evaluated: bool = False) -> None:
        request = rollout_pb2.StartWeightUpdateRequest(
            job_id=job_id, version=version, evaluated=evaluated, attempt=self._attempt
        )
        start = time.monotonic()
        await self._call(self._stub.StartWeightUpdate, request)
        if self.paused_at is None:  # a later attempt finds it paused
            self.paused_at = time.monotonic()
            self.drain_s = self.paused_at - start

    async def update(self, request: rollout_pb2.UpdateWeightsRequest) -> None:
        request.attempt = self._attempt
        await self._call(self._stub.UpdateWeights, request)

    async def finish(self, job_id: str, published: Published) -> None:
        request = rollout_pb2.FinishWeightUpdateRequest(
            job_id=job_id,
            version=published.version,
            evaluated=published.evaluated,
            hashes=published.hashes,
            attempt=self._attempt,
        )
        await self._call(self._stub.FinishWeightUpdate, request)
        self.verified_at = time.monotonic()

    async def pull(self, request: rollout_pb2.PullAdapterRequest) -> None:
        """Has it fetch an adapter next to those of other jobs."""
        start = time.monotonic()
        await self._call(self._stub.PullAdapter, request)
        self.paused_at, self.verified_at = start, time.monotonic()

    def serves(self, job_id: str, published: Published) -> bool:
        """Returns True if the replica's last status shows exactly these weights. The digest alone is not enough: at the
        start the average has the digest of the trained weights, but must not be sampled with."""
        status = self.last_status
        return (
            status.state == rollout_pb2.ROLLOUT_STATE_SERVING
            and (status.job_id, status.policy_version) == (job_id, published.version)
            and status.evaluated == published.evaluated
            and status.weights_digest == published.digest
        )

    async def _call(self, method: Any, request: Any, limit_s: float = float("inf")) -> Any:
        timeout_s = min(limit_s, self._deadline - time.monotonic())
        if timeout_s <= 0:
            raise ReplicaFailure("timed out: raise timeouts.publish_s")
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            is_victim = error.code() is grpc.StatusCode.DATA_LOSS  # see services/rollout/weights/receiver.py
            raise ReplicaFailure(rpc.rpc_error_message(error), is_victim=is_victim) from None


class Phase:
    """A call to all replicas at once. Its failures are known while other replicas still wait."""

    def __init__(self, clients: Iterable[ReplicaClient], call: Callable[[ReplicaClient], Awaitable[object]]) -> None:
        self.failed: dict[str, ReplicaFailure] = {}
        """So far, by replica id."""
        self._call = call
        self._task = asyncio.create_task(failures(clients, self._recorded))

    @property
    def guilty(self) -> dict[str, ReplicaFailure]:
        """Members of `failed` that caused the failure."""
        return {replica_id: failure for replica_id, failure in self.failed.items() if not failure.is_victim}

    async def ended(self, timeout_s: float | None = None) -> bool:
        """Waits until all have answered; whether they did in time."""
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if done:
            self._task.result()
        return bool(done)

    async def give_up(self) -> None:
        """Cancels the calls that have not ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _recorded(self, client: ReplicaClient) -> None:
        try:
            await self._call(client)
        except ReplicaFailure as failure:
            self.failed[client.replica_id] = failure


async def failures(
    clients: Iterable[ReplicaClient], call: Callable[[ReplicaClient], Awaitable[object]]
) -> dict[str, ReplicaFailure]:
    """Calls all replicas at once and waits for all; returns those that failed, by replica id."""
    clients = list(clients)
    outcomes = await asyncio.gather(*map(call, clients), return_exceptions=True)
    failed: dict[str, ReplicaFailure] = {}
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, ReplicaFailure):
            failed[client.replica_id] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return failed


def messages(failed: Mapping[str, ReplicaFailure]) -> dict[str, str]:
    return {replica_id: str(failure) for replica_id, failure in failed.items()}
