"""Broadcast of weights to all replicas at once, through one transfer group of trainer rank 0 and the live replicas.

A member that dies breaks the group for all. The member at fault is then left out; the others form a new group and take
the version again from its first bucket. The group is kept for the next version while its members (replica and
incarnation) stay the same. Every wait is bounded by the group's timeout or the publisher's deadline. A replica that
reports a failure, or whose connection ends, stops the attempt at once, because NCCL would wait for it.
"""

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterable, Mapping

import torch

from flowfleet.errors import FlowfleetError
from flowfleet.hardware import devices
from flowfleet.proto import rollout_pb2
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest
from flowfleet.weights.transfer import GroupBroken, TransferMember, TransferStore
from services.trainer.commands import Command, Kind
from services.trainer.publishing.replicas import Phase, ReplicaClient, ReplicaFailure, failures, messages
from services.trainer.runner import Runner
from services.trainer.worker import Job, Published, Worker

MAX_ATTEMPTS = 3
"""Consecutive failures without a member found at fault."""
_SETTLE_S = 5.0
_SETTLE_KNOWN_S = 1.0
"""Settling time when a member at fault is already known."""
_MAX_TIMEOUT_S = 60.0
_TIMEOUT_SHARE = 1 / 6
"""Share of the job's `timeouts.publish_s` per attempt: several attempts must fit in."""

log = logging.getLogger(__name__)

Member = tuple[str, str]
"""Replica id and incarnation."""


class _Broken(Exception):
    """The attempt cannot continue. `guilty`: errors of the members at fault, by replica id."""

    def __init__(self, reason: str, guilty: Mapping[str, str]) -> None:
        super().__init__(reason)
        self.guilty = dict(guilty)


class Broadcaster:
    """`host` is where the replicas reach this process."""

    def __init__(self, worker: Worker, runner: Runner, host: str) -> None:
        self._worker = worker
        self._runner = runner
        self._host = host
        self._store: TransferStore | None = None
        self._group: rollout_pb2.TransferGroup | None = None
        self._members: tuple[Member, ...] = ()
        """In order of their ranks, from rank 1."""
        self._last: Published | None = None

    def backend(self, clients: Iterable[ReplicaClient]) -> str:
        """The one that reaches the replicas, by their last statuses; see `common_backend`."""
        return common_backend(self._worker.ranks.device, [client.last_status for client in clients])

    async def publish(
        self, job: Job, request: PublishWeightsRequest, clients: list[ReplicaClient], failed: dict[str, str]
    ) -> Published | None:
        """Sends the version and returns what was sent, None without receivers. Inside a turn, after the status calls.

        `failed` says what went wrong before by replica id; those are left out, and further failures are added to it.
        """
        clients = [client for client in clients if client.replica_id not in failed]
        failed |= messages(await failures(clients, lambda client: self._bind(job, client)))
        fruitless = 0
        while waiting := [client for client in clients if self._wants(job, client, request, failed)]:
            try:
                failed |= await self._attempt(job, request, waiting)
                break
            except _Broken as broken:
                self.leave()
                log.warning(
                    "broadcast failed: %s; at fault: %s", broken, sorted(broken.guilty), extra={"job": job.job_id}
                )
                fruitless = 0 if broken.guilty else fruitless + 1
                failed |= broken.guilty
                if fruitless == MAX_ATTEMPTS:
                    failed |= {client.replica_id: str(broken) for client in waiting}
        return self._of(request)

    def leave(self) -> None:
        """Leaves the group; the next attempt makes another."""
        if self._worker.member is not None:
            self._worker.member.abort()
        self._worker.member, self._group, self._members = None, None, ()

    def close(self) -> None:
        """Leaves the group for good."""
        if self._worker.member is not None:
            self._worker.member.close()
        self.leave()

    def _of(self, request: PublishWeightsRequest) -> Published | None:
        """Returns the weights sent last, or None if the request asks for other ones."""
        return self._last if self._last is not None and self._last.is_of(request) else None

    def _wants(
        self, job: Job, client: ReplicaClient, request: PublishWeightsRequest, failed: Mapping[str, str]
    ) -> bool:
        sent = self._of(request)
        return client.replica_id not in failed and not (sent is not None and client.serves(job.job_id, sent))

    async def _bind(self, job: Job, client: ReplicaClient) -> None:
        """Loading the model can take long, so it comes before the group, whose members wait for each other."""
        if client.last_status.job_id != job.job_id:
            self.leave()  # it was another job's meanwhile, and maybe in that one's group
        await client.init(job.job_id, job.spec)

    async def _attempt(self, job: Job, request: PublishWeightsRequest, clients: list[ReplicaClient]) -> dict[str, str]:
        """Tries one broadcast to all of `clients`. Returns the error of each replica that failed to verify, by its id.
        Raises _Broken when a replica lacks a bucket."""
        group = await self._join(job, clients)
        await _done(
            Phase(clients, lambda client: client.start(job.job_id, request.version, evaluated=request.evaluated))
        )
        source = rollout_pb2.Broadcast(group_id=group.group_id, buckets=job.engine.buckets)
        update = rollout_pb2.UpdateWeightsRequest(
            job_id=job.job_id, version=request.version, evaluated=request.evaluated, broadcast=source
        )
        receiving = Phase(clients, lambda client: self._update(client, update))
        try:
            published: Published = await self._runner.call(Command(Kind.SEND_WEIGHTS, request))
        except FlowfleetError as error:
            self.leave()
            raise _Broken(str(error), await _guilty(clients, receiving)) from None
        if not await receiving.ended(group.timeout_s):  # the last buckets may have left without having arrived
            reason = f"not all weights arrived within {group.timeout_s:.0f} s"
            raise _Broken(reason, await _guilty(clients, receiving))
        await _done(receiving)
        self._last = published
        return messages(await failures(clients, lambda client: client.finish(job.job_id, published)))

    async def _update(self, client: ReplicaClient, update: rollout_pb2.UpdateWeightsRequest) -> None:
        try:
            await client.update(update)
        except ReplicaFailure:
            if self._worker.member is not None:
                self._worker.member.abort()  # it takes no more buckets, so the sender must not wait for it
            raise

    async def _join(self, job: Job, clients: list[ReplicaClient]) -> rollout_pb2.TransferGroup:
        """The group of exactly these replicas: the present one if it is that, else another."""
        members = tuple(sorted((client.replica_id, client.last_status.incarnation) for client in clients))
        if self._group is None or members != self._members:
            self.leave()
            self._group, self._members = self._new_group(job, clients), members
        group, ranks = self._group, {name: rank for rank, (name, _) in enumerate(self._members, start=1)}
        given_up = threading.Event()

        async def join(client: ReplicaClient) -> None:
            theirs = rollout_pb2.TransferGroup()
            theirs.CopyFrom(group)
            theirs.rank = ranks[client.replica_id]
            try:
                await client.init(job.job_id, job.spec, theirs)
            except ReplicaFailure:
                given_up.set()
                raise

        joining = Phase(clients, join)
        if self._worker.member is None:
            device = self._worker.ranks.device
            try:
                self._worker.member = await asyncio.to_thread(
                    TransferMember.join, group, device, self._store, given_up.is_set
                )
            except RuntimeError as error:
                absent = self._absent(error)
                guilty = await _guilty(clients, joining) or absent
                raise _Broken(f"the transfer group did not form: {error}", guilty) from None
        await _done(joining)
        return group

    def _absent(self, error: RuntimeError) -> dict[str, str]:
        """Returns an error for each replica that did not join the group, by its id. If all are missing the cause is not
        in a single replica, so the result is empty."""
        missing = error.missing if isinstance(error, GroupBroken) else ()
        if len(missing) == len(self._members):
            return {}
        return {self._members[rank - 1][0]: f"it did not join: {error}" for rank in missing}

    def _new_group(self, job: Job, clients: list[ReplicaClient]) -> rollout_pb2.TransferGroup:
        timeout_s = min(_MAX_TIMEOUT_S, job.spec.timeouts.publish_s * _TIMEOUT_SHARE)
        if self._store is None:
            self._store = TransferStore(self._host, timeout_s)
        return rollout_pb2.TransferGroup(
            group_id=uuid.uuid4().hex,
            backend=self.backend(clients),
            store_host=self._store.host,
            store_port=self._store.port,
            rank=0,
            world_size=len(clients) + 1,
            timeout_s=timeout_s,
        )


def common_backend(device: torch.device, replicas: Iterable[rollout_pb2.RolloutStatus]) -> str:
    """The backend of trainer rank 0's `device`, if every replica has an accelerator of that kind to itself; else
    "gloo", by way of host memory: NCCL refuses a group in which two members share a GPU."""
    device_id = devices.identity(device)
    kinds, ids = [device.type], [device_id]
    for status in replicas:
        kinds.append(status.device.partition(":")[0])
        ids.append(status.device_id)
    return devices.backend(device) if len(set(kinds)) == 1 and all(ids) and len(set(ids)) == len(ids) else "gloo"


async def _done(phase: Phase) -> None:
    """Raises _Broken when a replica failed."""
    await phase.ended()
    if phase.failed:
        guilty = phase.guilty
        name = next(iter(guilty or phase.failed))
        raise _Broken(f"replica {name}: {phase.failed[name]}", messages(guilty))


async def _guilty(clients: list[ReplicaClient], phase: Phase) -> dict[str, str]:
    """Returns the error of each replica that broke the group, by its id: it reported a failure of its own in the
    interrupted phase, or it is gone, or it restarted.

    Cancels the call of a replica that still waits for buckets, so that it gives up.
    """

    async def probe(client: ReplicaClient) -> None:
        before = client.last_status.incarnation
        if (await client.status(_SETTLE_S)).incarnation != before:
            raise ReplicaFailure("it restarted during the update")

    probed = await failures(clients, probe)
    await phase.ended(_SETTLE_KNOWN_S if probed or phase.guilty else _SETTLE_S)
    await phase.give_up()
    return messages(probed) | messages(phase.guilty)
