"""Keeps a `Fleet` true and lends its replicas out.

What a replica is comes from its record in Redis, of which each look reads those that changed. A replica itself is
asked, by gRPC, only in doubt: its record was not renewed in time, a call to it broke, or it refused what its record
promises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet.data.replicas import LOOK_COUNT, ReplicaDirectory
from flowfleet.process.service import secret
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import keys
from flowfleet.rpc.endpoint import open_channel
from flowfleet.rpc.kinds import ROLLOUT_TOKEN
from services.controller.concurrency import end
from services.controller.fleet.replicas import Fleet, Offer, Replica, Verified
from services.controller.fleet.turns import Turns

log = logging.getLogger(__name__)

STATUS_DEADLINE_S = 3.0
ASKED_AT_ONCE = 100
TIDY_EVERY_S = 10.0
EMPTY_S = 5.0
"""Time without a live replica after which waiting jobs report their pool."""
EMPTY_LOOK_S = 0.5
RETRY_S = 2.0
_DOUBTFUL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED)


class NobodyThere(Exception):
    """The pool has had no live replica for a while."""


class Want(NamedTuple):
    """A replica of a version in low … high, in its evaluated weights or in those that sample, that has less than
    `limit` samples outstanding; one of the pool `idle`, none."""

    low: int
    high: int
    limit: int
    evaluated: bool = False
    idle: str = ""


@dataclass(eq=False)
class _Waiter:
    samples: int
    replica: asyncio.Future[Replica]


class ReplicaQueue:
    """Lends replicas out, by job. Serves the earliest step first, because it trains first, and those that want the same
    in order of arrival."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[str, dict[Want, deque[_Waiter]]] = {}

    async def take(self, job_id: str, want: Want, samples: int) -> Replica:
        """Waits for a replica, and charges it with `samples`."""
        waiter = _Waiter(samples, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(job_id, {}).setdefault(want, deque()).append(waiter)
        self.serve(job_id)
        try:
            return await waiter.replica
        except asyncio.CancelledError:
            if waiter.replica.done() and not waiter.replica.cancelled():
                self.give_back(job_id, waiter.replica.result(), samples)
            else:
                self._leave(job_id, want, waiter)
            raise

    def give_back(self, job_id: str, replica: Replica, samples: int) -> None:
        self._fleet.charge(replica.replica_id, -samples, job_id)
        self.serve(job_id)

    def serve(self, job_id: str) -> None:
        """Gives those of a job who wait what is there for them."""
        for want, queue in sorted(self._waiting.get(job_id, {}).items(), key=lambda item: item[0].high):
            while queue and (replica := self._fleet.choose(job_id, *want)) is not None:
                waiter = queue.popleft()
                if not waiter.replica.done():
                    self._fleet.charge(replica.replica_id, waiter.samples, job_id)
                    waiter.replica.set_result(replica)
            self._tidy(job_id, want)

    def serve_touched(self) -> None:
        """Notifies the jobs whose replicas changed."""
        touched, self._fleet.touched = self._fleet.touched, set()
        for job_id in touched & self._waiting.keys():
            self.serve(job_id)

    def _leave(self, job_id: str, want: Want, waiter: _Waiter) -> None:
        queue = self._waiting.get(job_id, {}).get(want, deque())
        if waiter in queue:
            queue.remove(waiter)
        self._tidy(job_id, want)

    def _tidy(self, job_id: str, want: Want) -> None:
        of_job = self._waiting.get(job_id, {})
        if want in of_job and not of_job[want]:
            del of_job[want]
        if not of_job:
            self._waiting.pop(job_id, None)


def _open(address: str) -> grpc.aio.Channel:
    """A channel to a replica, which sees the token of each call."""
    return open_channel(address, token=secret(ROLLOUT_TOKEN))


class FleetWatch:
    """`poll_s`: from look to look."""

    def __init__(self, redis: Redis, *, poll_s: float = 0.5) -> None:
        self.fleet = Fleet()
        self.turns = Turns()
        self._desk = ReplicaQueue(self.fleet)
        self._redis = redis
        self._directory = ReplicaDirectory(redis)
        self._poll_s = poll_s
        self._revision = 0
        self._unreadable: set[str] = set()
        """Replicas that run but cannot be used by this controller."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leases: Counter[str] = Counter()
        self._looking = asyncio.Lock()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(ASKED_AT_ONCE)
        self._tidied = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._watch(), name="fleet-watch")

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self) -> None:
        await end([*([self._task] if self._task is not None else []), *self._asking.values()])
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def refresh(self) -> None:
        """Reads what replicas say. Begins to ask those in doubt, without waiting for their answers."""
        async with self._looking:
            await self._look()
            await self._close_unused()
        self._ask_doubted()
        self._desk.serve_touched()

    def mark_suspect(self, replica_ids: Iterable[str]) -> None:
        """Marks replicas for a direct status check."""
        self.fleet.mark_suspect(replica_ids)
        self._ask_doubted()

    def verified(self, job_id: str, verified: Verified | None) -> None:
        """From now on a job's replicas are lent by this as well; None: by the version's number alone."""
        if verified is None:
            self.fleet.verified.pop(job_id, None)
            self.fleet.offers.pop(job_id, None)
            self.turns.forget(job_id)
        else:
            self.fleet.verified[job_id] = verified
            self._desk.serve(job_id)

    async def offer(self, job_id: str, offer: Offer | None) -> None:
        """From now on a job's requests bring this adapter; it is remembered. None: replicas must serve the job."""
        if offer is None:
            self.fleet.offers.pop(job_id, None)
            self.turns.stored.discard(job_id)
            await self._redis.delete(keys.adapter(job_id))
            return
        stored = rollout_pb2.PullAdapterRequest(
            job_id=job_id,
            version=offer.version,
            evaluated=offer.evaluated,
            weights_digest=offer.digest,
            adapter=offer.adapter,
        )
        await self._redis.set(keys.adapter(job_id), stored.SerializeToString())
        self._offer(job_id, offer)
        self._desk.serve(job_id)

    async def recall(self, job_id: str, pool: str) -> None:
        """Offers the adapter that was stored last, as after a restart."""
        data: Any = await self._redis.get(keys.adapter(job_id))
        if data is not None and job_id not in self.fleet.offers:
            one = rollout_pb2.PullAdapterRequest.FromString(data)
            self._offer(job_id, Offer(pool, one.version, one.evaluated, one.weights_digest, one.adapter))

    def _offer(self, job_id: str, offer: Offer) -> None:
        self.fleet.offers[job_id] = offer
        self.turns.stored.add(job_id)

    @contextmanager
    def updating(self, job_id: str) -> Iterator[None]:
        """Around an update of a job's trainer, or of its weights; several may overlap."""
        self.fleet.updating[job_id] += 1
        try:
            yield
        finally:
            self.fleet.updating -= Counter([job_id])
            self._desk.serve(job_id)

    def look_again(self) -> None:
        """The next look reads all records: Redis has lost changes, and its revisions are not those that we know."""
        self._revision = 0

    def stub(self, address: str) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
        if address not in self._channels:
            self._channels[address] = _open(address)
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[address])

    @asynccontextmanager
    async def lease(self, pools: Sequence[str], job_id: str, want: Want, samples: int) -> AsyncIterator[Replica]:
        """Waits for a replica at an admissible version, charges it with `samples`, and frees it at the end. Waits for
        as long as replicas of the pools are busy or behind; raises NobodyThere when there are none."""
        replica = await self._take(pools, job_id, want, samples)
        self._leases[replica.address] += 1
        try:
            yield replica
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.fleet.missed(replica.replica_id, lost=True)
            elif error.code() in _DOUBTFUL:
                self.mark_suspect([replica.replica_id])
            raise
        finally:
            self._leases[replica.address] -= 1
            self._desk.give_back(job_id, replica, samples)

    async def _take(self, pools: Sequence[str], job_id: str, want: Want, samples: int) -> Replica:
        try:
            async with asyncio.timeout(None) as limit:
                looking = asyncio.create_task(self._end_when_empty(limit, pools))
                try:
                    return await self._desk.take(job_id, want, samples)
                finally:
                    looking.cancel()
        except TimeoutError:
            raise NobodyThere(f"no live replica in {', '.join(pools)}") from None

    async def _end_when_empty(self, wait: asyncio.Timeout, pools: Sequence[str]) -> None:
        """Lets a wait time out once the pools have been without a live replica for a while."""
        lived = time.monotonic()
        while time.monotonic() - lived < EMPTY_S:
            await asyncio.sleep(EMPTY_LOOK_S)
            if any(self.fleet.any_live(pool) for pool in pools):
                lived = time.monotonic()
        wait.reschedule(asyncio.get_running_loop().time())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except RedisError as error:
                log.warning("fleet could not refresh the replica list: %s", error)
            except Exception:  # without this watch no job would get a replica any more
                log.exception("fleet could not refresh the replica list")
                await asyncio.sleep(RETRY_S)

    async def _look(self) -> None:
        """Changes, until there are no more; then who left: a look counts all replicas, and knows every new one."""
        while True:
            look = await self._directory.look(self._revision)
            self.fleet.update(look.changed)
            self.fleet.forget(look.unreadable)
            self._unreadable -= {record.replica_id for record in look.changed}
            self._unreadable |= look.unreadable
            self._revision = look.revision
            if len(look.changed) + len(look.unreadable) < LOOK_COUNT:
                break
        if look.number != len(self.fleet) + len(self._unreadable):
            members = await self._directory.members()
            self.fleet.keep(members)
            self._unreadable.intersection_update(members)
            if look.number > len(self.fleet) + len(self._unreadable):
                self._revision = 0  # the server lost data: its revisions are not those that we know
        self.fleet.mark_suspect(look.stale)

    def _ask_doubted(self) -> None:
        for replica in self.fleet.doubted():
            if replica.replica_id not in self._asking:
                self._asking[replica.replica_id] = asyncio.create_task(self._ask(replica))

    async def _ask(self, replica: Replica) -> None:
        """Asks a replica for its status. It counts as unreachable only if retries fail too."""
        try:
            async with self._turn:
                status = await self._status(replica.address)
        except grpc.aio.AioRpcError as error:
            log.info("replica %s status unknown: %s", replica.replica_id, error.code().name)
            self.fleet.missed(replica.replica_id, lost=error.code() is grpc.StatusCode.UNAVAILABLE)
        else:
            self.fleet.answered(replica.replica_id, status)
        finally:
            del self._asking[replica.replica_id]
        self._desk.serve_touched()

    async def _status(self, address: str) -> rollout_pb2.RolloutStatus:
        """Over the replica's channel, if it has one. Else one for this call alone: after a Redis outage the whole fleet
        is in doubt, and has more replicas than this process may open files."""
        request = rollout_pb2.GetRolloutStatusRequest()
        if address in self._channels:
            return await self.stub(address).GetStatus(request, timeout=STATUS_DEADLINE_S)
        async with _open(address) as channel:
            return await rollout_pb2_grpc.RolloutServiceStub(channel).GetStatus(request, timeout=STATUS_DEADLINE_S)

    async def _close_unused(self) -> None:
        """A replica that drains has left the registry and still finishes what it was asked."""
        if time.monotonic() - self._tidied < TIDY_EVERY_S:
            return
        self._tidied = time.monotonic()
        used = {replica.address for replica in self.fleet.all()}
        for address in [known for known in self._channels if known not in used and not self._leases[known]]:
            await self._channels.pop(address).close(None)
            del self._leases[address]
