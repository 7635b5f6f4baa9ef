"""The replica's end of a weight update: Init, Start, Update, Finish, one at a time, around the pure `WeightState`.

What has begun to change the model is never cut short by a caller who goes away: it runs to its end and its outcome is
recorded. But a broadcast, or a group that forms, has no end without the trainer: when the caller goes away the group is
left, so that the next one need not wait for the timeout. Whatever fails leaves the replica without verified weights.

A replica that samples for several jobs pulls: it fetches the adapter of a request that it lacks, from the blob store or
from a cache in host memory, and puts it into a slot, while it samples with the others.

DataLoss says that the group broke by another member's fault; the trainer lays every other failure to this replica.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from flowfleet.data.blobs import BlobStore
from flowfleet.data.replicas import VANISHED
from flowfleet.errors import Conflict, DataLoss, Unavailable
from flowfleet.job.fingerprints import CHANGED, differ, fingerprint
from flowfleet.models.registry import family_of
from flowfleet.peers import Peers
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.weights import weights
from flowfleet.weights.lora import adapter_from_bytes
from flowfleet.weights.transfer import GroupBroken, TransferMember
from services.rollout.engines.base import RolloutEngine
from services.rollout.weights.binding import Binding, base_of, read_adapter, read_binding, read_group
from services.rollout.weights.cache import AdapterCache
from services.rollout.weights.slots import Key
from services.rollout.weights.state import Attempts, Phase, WeightState

log = logging.getLogger(__name__)


class WeightReceiver:
    """`settled()` waits until no sample is in flight; the state has stopped admission by then."""

    def __init__(
        self,
        engine: RolloutEngine,
        state: WeightState,
        blobs: BlobStore,
        settled: Callable[[], Awaitable[object]],
        peers: Peers,
        released: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`released()` waits until some sample ends."""
        self._engine = engine
        self._released = released or settled
        self._cache = AdapterCache(blobs)
        self._pulls: dict[Key, asyncio.Task[None]] = {}
        self._base: tuple[bytes, tuple[str, ...]] | None = None
        """Model and targets that the slots' adapters share."""
        self._state = state
        self._blobs = blobs
        self._settled = settled
        self._peers = peers
        self._lock = asyncio.Lock()
        self._attempts = Attempts()
        self._binding: Binding | None = None
        self._member: TransferMember | None = None

    async def init(self, request: rollout_pb2.InitWeightTransferRequest) -> None:
        """Binds to the job; a binding that is the same already stays, served version included. So does what is bound
        when the request cannot work: it is checked first."""
        if self._state.draining:
            raise Unavailable("this replica is draining: publish to another")
        binding, group = read_binding(request), read_group(request, self._engine.device)
        given_up = threading.Event()
        await self._lock.acquire()
        try:
            await self._to_the_end(self._init(binding, group, request.attempt, given_up.is_set))
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def start(self, request: rollout_pb2.StartWeightUpdateRequest) -> None:
        """Stops admission, then waits for what runs."""
        async with self._lock:
            self._attempts.admit(request.job_id, request.attempt)
            self._state.start(request.job_id, request.version, evaluated=request.evaluated)
            await self._settled()

    async def update(self, request: rollout_pb2.UpdateWeightsRequest) -> None:
        await self._lock.acquire()
        try:
            await self._to_the_end(self._update(request))
        except asyncio.CancelledError:
            if self._member is not None and self._member.group_id == request.broadcast.group_id:
                self._leave()
            raise

    async def finish(self, request: rollout_pb2.FinishWeightUpdateRequest) -> None:
        """Verifies and serves. Repeating it for the version served is fine."""
        await self._lock.acquire()
        await self._to_the_end(self._finish(request))

    async def pull(self, key: Key, adapter: rollout_pb2.Adapter) -> None:
        """Returns when the weights are ready, unless others took their slot meanwhile."""
        if self._state.draining:
            raise Unavailable("this replica is draining: call another")
        if self._state.is_ready(key):
            return
        self._attempts.admit(key.job_id, adapter.attempt)
        if key not in self._pulls:
            self._pulls[key] = asyncio.create_task(self._pull(key, adapter))
            self._pulls[key].add_done_callback(partial(self._pulled, key))
        await asyncio.shield(self._pulls[key])

    def _pulled(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._pulls[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("adapter of version %d not pulled: %s", key.version, error, extra={"job": key.job_id})

    async def _pull(self, key: Key, adapter: rollout_pb2.Adapter) -> None:
        binding = read_adapter(key.job_id, adapter, self._engine)
        tensors = await self._cache.get(key, adapter.blob)
        async with self._lock:
            await self._share(binding, adapter)
            while (slot := self._state.slots.place()) is None:
                await self._released()
            try:
                digest = await self._engine.hold(slot, adapter, tensors)
                if digest != key.digest:
                    self._cache.forget(key)
                    raise Conflict(
                        f"{VANISHED} of version {key.version} with the digest {key.digest[:12]}, but one with "
                        f"{digest[:12]}: publish it again"
                    )
            except BaseException:
                self._state.slots.abandon(slot)
                raise
            self._state.put(key, slot)
        log.info("version %d is ready, digest %s", key.version, digest[:12], extra={"job": key.job_id})

    async def _share(self, binding: Binding, adapter: rollout_pb2.Adapter) -> None:
        """Makes the base of an adapter live, if another one is, once nothing samples."""
        base = base_of(adapter)
        if self._state.phase is Phase.SHARING and base == self._base:
            return
        folder = await self._peers.model(binding.model.path, binding.model.fingerprint)
        model = await asyncio.to_thread(_local, binding.model, folder)
        self._binding = None
        self._state.bind("")
        await self._settled()
        self._state.touch()
        await self._engine.share(rollout_pb2.Adapter(model=model, lora=adapter.lora))
        self._base = base
        self._state.share()
        log.info("shares %s", binding.model.path)

    def close(self) -> None:
        """Leaves the transfer group for good."""
        if self._member is not None:
            self._member.close()
            self._member = None

    async def _init(
        self, binding: Binding, group: rollout_pb2.TransferGroup | None, attempt: int, given_up: Callable[[], bool]
    ) -> None:
        self._attempts.admit(binding.job_id, attempt)
        if binding != self._binding:
            folder = await self._peers.model(binding.model.path, binding.model.fingerprint)
            model = await asyncio.to_thread(_local, binding.model, folder)  # raises before anything is let go
            self._binding = None
            self._state.bind("")
            await self._settled()
            self._state.touch()
            await self._engine.prepare(model, binding.lora)
            self._state.bind(binding.job_id)
            self._binding = binding
            log.info("bound", extra={"job": binding.job_id})
        if group is not None and (self._member is None or self._member.group_id != group.group_id):
            self._leave()
            self._member = await self._join(group, given_up)

    async def _join(self, group: rollout_pb2.TransferGroup, given_up: Callable[[], bool]) -> TransferMember:
        try:
            return await asyncio.to_thread(TransferMember.join, group, self._engine.device, None, given_up)
        except GroupBroken as error:
            raise DataLoss(f"transfer group {group.group_id} did not form: {error}") from None

    async def _update(self, request: rollout_pb2.UpdateWeightsRequest) -> None:
        self._attempts.admit(request.job_id, request.attempt)
        self._state.require_updating(request.job_id, request.version, evaluated=request.evaluated)
        try:
            match request.WhichOneof("source"):
                case "adapter":
                    await self._load_adapter(request.adapter)
                case "broadcast":
                    await self._receive(request.broadcast)
                case "shared":
                    self._state.touch()
                    await self._engine.load_shared()
                case _:
                    raise ValueError("source: give an adapter blob or a broadcast")
        except BaseException:
            self._state.forget()
            raise
        self._state.loaded()

    async def _load_adapter(self, ref: common_pb2.BlobRef) -> None:
        assert self._binding is not None
        if self._binding.lora is None:
            raise ValueError("source: this job trains full weights, which come by broadcast, not as an adapter")
        adapter = adapter_from_bytes(await self._blobs.get(ref))
        self._state.touch()
        await self._engine.load_adapter(adapter)

    async def _receive(self, broadcast: rollout_pb2.Broadcast) -> None:
        if self._member is None or self._member.group_id != broadcast.group_id:
            raise DataLoss(f"not in transfer group {broadcast.group_id}: form another group and send all weights again")
        self._state.touch()
        try:
            await self._engine.receive(self._member, broadcast.buckets)
        except GroupBroken as error:
            self._leave()
            raise DataLoss(f"the broadcast failed: {error}; form another group and send all weights again") from None
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._member is not None:
            self._member.abort()
            self._member = None

    async def _finish(self, request: rollout_pb2.FinishWeightUpdateRequest) -> None:
        self._attempts.admit(request.job_id, request.attempt)
        state = self._state
        is_held = state.holds(request.job_id, request.version, evaluated=request.evaluated)
        if is_held and state.phase is Phase.SERVING and state.digest == weights.digest(request.hashes):
            return
        state.require_loaded(request.job_id, request.version, evaluated=request.evaluated)
        try:
            digest = await self._engine.verify(request.hashes)
        except BaseException:
            state.forget()
            raise
        state.finish(digest)
        kind = "evaluated weights, " if request.evaluated else ""
        log.info("serving version %d, %sdigest %s", request.version, kind, digest[:12], extra={"job": request.job_id})

    async def _to_the_end(self, operation: Coroutine[Any, Any, None]) -> None:
        """Runs an operation that a cancelled caller does not cancel. Takes over the lock and releases it."""
        task = asyncio.create_task(operation)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lock.release()
        if not task.cancelled() and task.exception() is not None:
            log.warning("weight update failed: %s", task.exception())


def _local(model: rollout_pb2.ModelSpec, folder: Path) -> rollout_pb2.ModelSpec:
    """The model by its folder. Raises ValueError where it cannot be loaded."""
    resolved = rollout_pb2.ModelSpec()
    resolved.CopyFrom(model)
    resolved.path = str(folder)
    if model.fingerprint and differ(model.fingerprint, fingerprint(folder)):
        raise Conflict(f"model.path: {model.path} {CHANGED}: put the former files back and resume the job")
    family_of(folder)
    return resolved
