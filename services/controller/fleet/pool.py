"""The rollout replicas of one job, of all that a `FleetWatch` knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from flowfleet.proto import rollout_pb2_grpc
from services.controller.fleet.replicas import Replica, Verified
from services.controller.fleet.watch import FleetWatch, NobodyThere, Want
from services.controller.waiting import WaitedInVain


class RolloutPool:
    """`limit`: samples that a replica may have outstanding when it is lent once more. `shortage` says why pods of a
    component and name cannot run, as `Directory.shortage`."""

    def __init__(
        self, watch: FleetWatch, job_id: str, name: str, *, limit: int, shortage: Callable[[str, str], str]
    ) -> None:
        self._watch, self._job_id, self._name = watch, job_id, name
        self._limit, self._shortage = limit, shortage

    @asynccontextmanager
    async def replica(self, low: int, high: int, samples: int, *, evaluated: bool = False) -> AsyncIterator[Replica]:
        """Lends a replica, as `FleetWatch.lease`. Raises WaitedInVain while the pool has no live replica."""
        want = Want(low, high, self._limit, evaluated)
        try:
            async with self._watch.lease(self._name, self._job_id, want, samples) as replica:
                yield replica
        except NobodyThere:
            raise WaitedInVain(self.nobody_there()) from None

    def nobody_there(self) -> str:
        """What to say of a pool without live replicas."""
        shortage = self._shortage("rollout", self._name)
        return f"pool {self._name!r} has no live rollout replica" + (f": {shortage}" if shortage else "")

    def stub(self, replica: Replica) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
        return self._watch.stub(replica.address)

    def live(self) -> list[Replica]:
        return self._watch.fleet.live(self._name)

    def behind(self, version: int, *, evaluated: bool) -> list[Replica]:
        """Live replicas that do not serve the job's version."""
        return self._watch.fleet.behind(self._name, self._job_id, version, evaluated=evaluated)

    @property
    def size(self) -> int:
        return self._watch.fleet.num_in(self._name)

    @property
    def num_devices(self) -> int:
        """Accelerators of the replicas that serve the job."""
        return self._watch.fleet.num_devices(self._job_id)

    def verified(self, verified: Verified) -> None:
        """Lends only replicas whose weights this accepts."""
        self._watch.verified(self._job_id, verified)

    def mark_suspect(self, replica_ids: Iterable[str]) -> None:
        self._watch.mark_suspect(replica_ids)

    async def refresh(self) -> None:
        await self._watch.refresh()
