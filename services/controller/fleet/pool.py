"""The rollout replicas of one job, of all that a `FleetWatch` knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager

from flowfleet.data.replicas import VANISHED
from flowfleet.job.spec import JobSpec
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc, trainer_pb2
from services.controller.fleet.replicas import Offer, Replica, Verified
from services.controller.fleet.turns import Turns
from services.controller.fleet.watch import FleetWatch, NobodyThere, Want
from services.controller.waiting import WaitedInVain

LOOKAHEAD = 2
"""Batches that a replica is given at once: one runs, the next waits there."""


class RolloutPool:
    """Rollouts, and the trainer's own ranks where these sample (`JobSpec.pools`). `shortage` says why pods of a
    component and name cannot run, as `Directory.shortage`."""

    def __init__(
        self,
        watch: FleetWatch,
        job_id: str,
        spec: JobSpec,
        *,
        share: rollout_pb2.Share | None = None,
        shortage: Callable[[str, str], str] = lambda *_: "",
    ) -> None:
        """`share`: what the job may have of replicas that it shares."""
        self._watch, self._job_id = watch, job_id
        self._name, self._names = spec.rollout.pool, spec.pools
        self._limit, self._shortage = LOOKAHEAD * spec.rollout.batch_size, shortage
        self._idle = spec.trainer_pool if spec.trainer.samples == "idle" else ""
        self._base = base_of(spec)
        self._share = share or rollout_pb2.Share()
        self._recalled = False
        watch.turns.share(job_id, self._base, lambda: self.shares)

    @asynccontextmanager
    async def replica(self, low: int, high: int, samples: int, *, evaluated: bool = False) -> AsyncIterator[Replica]:
        """Lends a replica, as `FleetWatch.lease`. Raises WaitedInVain while the pool has no live replica."""
        if self._base and not self._recalled:
            await self._watch.recall(self._job_id, self._name)
            self._recalled = True
        want = Want(low, high, self._limit, evaluated, self._idle)
        try:
            async with self._watch.lease(self._names, self._job_id, want, samples) as replica:
                yield replica
        except NobodyThere:
            raise WaitedInVain(self.nobody_there()) from None

    @property
    def shares(self) -> bool:
        """True if the job's replicas sample for other jobs on its base too."""
        return bool(self._base) and self._watch.fleet.shares(self._name)

    @property
    def pulls(self) -> bool:
        """True if replicas fetch the job's adapter. A job alone on accelerators has it broadcast, which is faster."""
        accelerated = any(replica.device_id for replica in self._watch.fleet.live(self._name))
        return self.shares and (not accelerated or self.turns.is_shared(self._job_id))

    async def offer(self, response: trainer_pb2.PublishWeightsResponse, *, evaluated: bool) -> None:
        """Sends what was published with requests from now on, where replicas are shared."""
        offer = None
        if response.HasField("adapter"):
            offer = Offer(self._name, response.version, evaluated, response.weights_digest, response.adapter)
        if offer is not None or self._base:
            await self._watch.offer(self._job_id, offer)

    def address(self, request: rollout_pb2.GenerateRequest, replica: Replica) -> None:
        """Says in a request which weights the replica samples with, and where it gets them."""
        request.policy_version, request.weights_digest = replica.version or 0, replica.digest
        if replica.offer is not None:
            request.adapter.CopyFrom(replica.offer.adapter)
            request.share.CopyFrom(self._share)

    async def failed(self, replica: Replica, reason: str) -> None:
        """Has an adapter published again that the blob store has lost."""
        is_newest = self._watch.fleet.offers.get(self._job_id) is replica.offer
        if replica.offer is not None and VANISHED in reason and is_newest:
            await self._watch.offer(self._job_id, None)

    def nobody_there(self) -> str:
        """Returns the reason why no replica is live."""
        if self._name not in self._names:
            return "no rank of the job's trainer has joined as a replica yet"
        shortage = self._shortage("rollout", self._name)
        return f"pool {self._name!r} has no live rollout replica" + (f": {shortage}" if shortage else "")

    @property
    def turns(self) -> Turns:
        """Turns of all jobs at their pools."""
        return self._watch.turns

    def stub(self, replica: Replica) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
        return self._watch.stub(replica.address)

    def live(self) -> list[Replica]:
        return [replica for name in self._names for replica in self._watch.fleet.live(name)]

    def rollouts_first(self) -> list[list[Replica]]:
        """Live replicas by pool, in the order in which they take a version: an update puts off what the trainer's ranks
        sample, and rollouts do not wait for that."""
        return [live for name in self._names if (live := self._watch.fleet.live(name))]

    def behind(self, version: int, *, evaluated: bool) -> list[Replica]:
        """Live replicas that do not serve the job's version."""
        fleet, job_id = self._watch.fleet, self._job_id
        if self.pulls:
            offer = fleet.offers.get(job_id)
            is_newest = offer is not None and (offer.version, offer.evaluated) == (version, evaluated)
            return [] if is_newest else fleet.live(self._name)
        return [r for name in self._names for r in fleet.behind(name, job_id, version, evaluated=evaluated)]

    @property
    def size(self) -> int:
        return sum(map(self._watch.fleet.num_in, self._names))

    @property
    def num_devices(self) -> int:
        """Accelerators of the rollouts that serve the job."""
        return self._watch.fleet.num_devices(self._job_id, self._name)

    def verified(self, verified: Verified) -> None:
        """Lends only replicas whose weights this accepts."""
        self._watch.verified(self._job_id, verified)

    def updating(self) -> AbstractContextManager[None]:
        """Around an update or a publication by the job's trainer, whose ranks get no prompt meanwhile where rollouts
        sample as well: they would refuse it."""
        return self._watch.updating(self._job_id)

    def mark_suspect(self, replica_ids: Iterable[str]) -> None:
        self._watch.mark_suspect(replica_ids)

    async def refresh(self) -> None:
        await self._watch.refresh()


def base_of(spec: JobSpec) -> str:
    """Returns what jobs that share replicas have in common; "" for a job that has its replicas to itself: it trains all
    weights or merges its adapter into them, or its trainer's ranks sample as well."""
    model, rollout, trainer = spec.model, spec.rollout, spec.trainer
    if trainer.mode != "lora" or rollout.adapter == "merged" or trainer.samples != "no":
        return ""
    parts = (
        rollout.pool,
        model.path,
        model.dtype,
        model.base,
        model.load_format,
        model.max_sequence_length,
        rollout.compile,
        rollout.quantization,
        trainer.lora.target_modules and sorted(trainer.lora.target_modules),
    )
    return repr(parts)
