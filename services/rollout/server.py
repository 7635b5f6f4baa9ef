"""RolloutService: admits requests, streams their samples, and reports the replica's status.

Admission is by version: a request names job and policy version, and is taken only while exactly these are served. Work
goes through the engine in order. A weight update stops admission, waits for the admitted work and only then touches the
model.

GetStatus reports the live version. The standard health service reports less: that this process lives and its engine
makes progress, so that a replica that waits for its first weights is not restarted.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from flowfleet.data.blobs import BlobStore
from flowfleet.data.replicas import ReplicaRecord
from flowfleet.hardware import devices
from flowfleet.peers import Peers
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from services.rollout.engines.base import RolloutEngine, forward_key
from services.rollout.metrics import RolloutMetrics
from services.rollout.registration import Membership
from services.rollout.sampling.generation import Generation
from services.rollout.sampling.media import MediaReader
from services.rollout.sampling.publisher import Publisher
from services.rollout.sampling.requests import generation_request, share_of
from services.rollout.weights.binding import MAX_TIMEOUT_S
from services.rollout.weights.receiver import WeightReceiver
from services.rollout.weights.slots import Key
from services.rollout.weights.state import Phase, Ticket, WeightState


class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """Wires engine, publisher and weight receiver to the calls of rollout.proto."""

    def __init__(
        self,
        engine: RolloutEngine,
        publisher: Publisher,
        media: MediaReader,
        blobs: BlobStore,
        metrics: RolloutMetrics,
        membership: Membership,
        peers: Peers,
        *,
        replica_id: str,
        incarnation: str,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._media = media
        self._metrics = metrics
        self._membership = membership
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._device_id = devices.identity(engine.device)
        self._samples_total = 0
        self._state = WeightState(membership.changed, engine.slots)
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self._receiver = WeightReceiver(engine, self._state, blobs, self._idle.wait, peers, self._released)

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        wanted = await self._media.read(request, generation_request(request))
        if request.HasField("adapter"):
            key = Key(request.job_id, request.policy_version, request.evaluated, request.weights_digest)
            while not self._state.is_ready(key):
                await self._receiver.pull(key, request.adapter)
        ticket = self._state.admit(
            request.job_id,
            request.policy_version,
            wanted.num_samples,
            evaluated=request.evaluated,
            digest=request.weights_digest,
        )
        self._changed()
        generate = self._engine.generate
        if ticket.key is not None:
            together = forward_key(wanted) if self._engine.mixes else None
            generate = partial(self._engine.generate_with, ticket.slot, share_of(request, together))
        generation = Generation(
            self._engine.device,
            generate,
            self._publisher,
            self._metrics,
            wire=request,
            request=wanted,
            check=lambda: self._state.check(ticket),
            is_overtaken=lambda: self._state.is_overtaken(ticket),
            on_done=partial(self._done, ticket),
        )
        async with aclosing(generation.events()) as events:
            async for event in events:
                yield event

    async def InitWeightTransfer(
        self, request: rollout_pb2.InitWeightTransferRequest, context: Any
    ) -> rollout_pb2.InitWeightTransferResponse:
        await self._receiver.init(request)
        return rollout_pb2.InitWeightTransferResponse()

    async def StartWeightUpdate(
        self, request: rollout_pb2.StartWeightUpdateRequest, context: Any
    ) -> rollout_pb2.StartWeightUpdateResponse:
        await self._receiver.start(request)
        self._changed()
        return rollout_pb2.StartWeightUpdateResponse()

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Any
    ) -> rollout_pb2.UpdateWeightsResponse:
        await self._receiver.update(request)
        return rollout_pb2.UpdateWeightsResponse()

    async def FinishWeightUpdate(
        self, request: rollout_pb2.FinishWeightUpdateRequest, context: Any
    ) -> rollout_pb2.FinishWeightUpdateResponse:
        await self._receiver.finish(request)
        self._changed()
        await self._membership.tell()
        return rollout_pb2.FinishWeightUpdateResponse()

    async def PullAdapter(
        self, request: rollout_pb2.PullAdapterRequest, context: Any
    ) -> rollout_pb2.PullAdapterResponse:
        key = Key(request.job_id, request.version, request.evaluated, request.weights_digest)
        await self._receiver.pull(key, request.adapter)
        self._changed()
        await self._membership.tell()
        return rollout_pb2.PullAdapterResponse()

    def record(self, address: str, model: str, pool: str) -> ReplicaRecord:
        """Record for the fleet: this replica's address and status."""
        state = self._state
        return ReplicaRecord(
            replica_id=self._replica_id,
            address=address,
            incarnation=self._incarnation,
            model=model,
            pool=pool,
            state=state.name,
            job_id=state.job_id,
            version=state.version,
            evaluated=state.evaluated,
            digest=state.digest,
            samples_total=self._samples_total,
            device=str(self._engine.device),
            device_id=self._device_id,
            num_devices=self._engine.num_devices,
            held=" ".join(sorted(map(str, state.held))),
            slots=self._engine.slots,
        )

    async def GetStatus(self, request: rollout_pb2.GetRolloutStatusRequest, context: Any) -> rollout_pb2.RolloutStatus:
        state = self._state
        return rollout_pb2.RolloutStatus(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            state=rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{state.name.upper()}"),
            job_id=state.job_id,
            policy_version=state.version,
            evaluated=state.evaluated,
            weights_digest=state.digest,
            in_flight=state.in_flight,
            samples_total=self._samples_total,
            engine=self._engine.name,
            device=str(self._engine.device),
            device_id=self._device_id,
            num_devices=self._engine.num_devices,
            held=[
                rollout_pb2.Held(
                    job_id=key.job_id, version=key.version, evaluated=key.evaluated, weights_digest=key.digest
                )
                for key in state.held
            ],
            slots=self._engine.slots,
        )

    async def Drain(self, request: rollout_pb2.DrainRequest, context: Any) -> rollout_pb2.DrainResponse:
        if not 0 <= request.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s = {request.timeout_s}: give seconds from 0 to {MAX_TIMEOUT_S:.0f}")
        return rollout_pb2.DrainResponse(unfinished=await self.drain(request.timeout_s))

    async def drain(self, timeout_s: float) -> int:
        """Rejects new work and waits for running samples; returns those still running at the deadline."""
        self._state.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._state.in_flight

    def close(self) -> None:
        self._receiver.close()

    async def _released(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    def _done(self, ticket: Ticket, num_samples: int, published: bool) -> None:
        self._state.release(num_samples, ticket)
        self._ended.set()
        self._samples_total += num_samples if published else 0
        self._changed()

    def _changed(self) -> None:
        state = self._state
        if state.in_flight:
            self._idle.clear()
        else:
            self._idle.set()
        self._metrics.in_flight(state.in_flight)
        self._metrics.idle(self._engine.idle_s)
        self._metrics.version(state.version if state.phase is Phase.SERVING else None)
