"""Which way the weights go, by where trainer and replicas compute, and who is left out when they do not arrive."""

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowfleet.errors import Unavailable
from flowfleet.hardware import devices
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.proto.rollout_pb2 import ROLLOUT_STATE_SERVING, RolloutStatus, TransferGroup
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest, Replica
from flowfleet.weights.transfer import GroupBroken, TransferMember
from services.trainer.commands import Kind
from services.trainer.publishing import broadcast
from services.trainer.publishing import publisher as publish
from services.trainer.publishing.broadcast import Broadcaster, common_backend
from services.trainer.publishing.publisher import Publisher
from services.trainer.publishing.replicas import ReplicaClient, ReplicaFailure
from services.trainer.worker import Published
from tests.services.trainer.steps import make_spec

GPU = torch.device("cuda", 0)


def status(device_id: str, device: str = "cuda:0") -> RolloutStatus:
    return RolloutStatus(device=device, device_id=device_id)


@pytest.fixture(autouse=True)
def own_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    real = devices.identity
    monkeypatch.setattr(devices, "identity", lambda device: "gpu-0" if device == GPU else real(device))


@pytest.mark.parametrize(
    ("replicas", "backend"),
    [
        ([status("gpu-1"), status("gpu-2")], "nccl"),
        ([], "nccl"),
        ([status("gpu-1"), status("gpu-0")], "gloo"),  # one shares the trainer's
        ([status("gpu-1"), status("gpu-1")], "gloo"),  # two share one
        ([status("gpu-1"), status("", "cpu")], "gloo"),
        ([status("npu-1", "npu:0")], "gloo"),
        ([status("")], "gloo"),  # says nothing of its device
    ],
)
def test_nccl_is_taken_where_every_member_has_a_gpu_to_itself(replicas: list[RolloutStatus], backend: str) -> None:
    assert common_backend(GPU, replicas) == backend


def test_the_cpu_has_gloo_alone() -> None:
    assert common_backend(torch.device("cpu"), [status("", "cpu")]) == "gloo"
    assert common_backend(torch.device("cpu"), [status("gpu-1")]) == "gloo"


class Group:
    """What rank 0 and fake replicas share, as over NCCL: a peer that fails is waited for."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.arrived: set[str] = set()
        self.size = 0

    def abort(self) -> None:
        self.aborted.set()


class Client:
    """A replica that does its part, fails with `failure` in an update, or, where absent, never comes to the group."""

    def __init__(self, name: str, failure: ReplicaFailure | None = None, *, is_absent: bool = False) -> None:
        self.replica_id = name
        self.failure, self.is_absent = failure, is_absent
        self.last_status = RolloutStatus(incarnation=name, job_id="j")
        self.groups: list[TransferGroup] = []
        self.verified: int | None = None
        self.drain_s, self.paused_at, self.verified_at = 0.0, None, None
        self.fleet: Fleet | None = None

    async def init(self, job_id: str, spec: Any, group: TransferGroup | None = None) -> None:
        if group is not None:
            self.groups.append(group)
            if self.is_absent:
                await asyncio.sleep(3600)

    async def start(self, job_id: str, version: int, *, evaluated: bool) -> None:
        pass

    async def status(self, timeout_s: float = 1.0) -> RolloutStatus:
        return self.last_status

    async def update(self, request: Any) -> None:
        if request.HasField("adapter"):
            return
        if self.failure is not None:
            raise self.failure
        assert self.fleet is not None
        group = self.fleet.group
        group.arrived.add(self.replica_id)
        while len(group.arrived) < group.size:  # its own abort alone would end that
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        pass

    async def finish(self, job_id: str, published: Published) -> None:
        self.verified = published.version

    def serves(self, job_id: str, published: Published) -> bool:
        return self.verified == published.version


class Fleet:
    """A broadcaster for fake replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clients: Client) -> None:
        self.clients = clients
        self.group = Group()
        for client in clients:
            client.fleet = self
        ranks = SimpleNamespace(device=torch.device("cpu"), world_size=1)
        worker: Any = SimpleNamespace(member=None, job=None, ranks=ranks)
        runner: Any = SimpleNamespace(call=self.send, turn=nullcontext)
        self.worker, self.runner = worker, runner
        self.broadcaster = Broadcaster(worker, runner, "127.0.0.1")
        monkeypatch.setattr(TransferMember, "join", self.join)
        monkeypatch.setattr(broadcast, "_SETTLE_S", 0.2)
        monkeypatch.setattr(broadcast, "_SETTLE_KNOWN_S", 0.1)

    def join(self, group: TransferGroup, *_: Any) -> Group:
        by_rank: dict[int, Client] = {}
        while len(by_rank) < group.world_size - 1:
            by_rank = {theirs.rank: c for c in self.clients for theirs in c.groups if theirs.group_id == group.group_id}
        missing = [rank for rank, client in by_rank.items() if client.is_absent]
        if missing:
            raise GroupBroken(f"ranks {missing} have not come", missing)
        self.group = Group()
        self.group.size = group.world_size - 1
        return self.group

    async def send(self, command: Any) -> Published:
        if command.kind is Kind.GATHER_ADAPTER:
            return Published(3, {"w": 1}, 4, BlobRef(uri="adapter"))
        group = self.group
        while len(group.arrived) < group.size:
            if group.aborted.is_set():
                raise Unavailable("the group was left")
            await asyncio.sleep(0.01)
        return Published(3, {"w": 1}, 4)

    def publish(self, model: Any) -> tuple[Published | None, dict[str, str]]:
        engine = SimpleNamespace(buckets=[])
        job: Any = SimpleNamespace(job_id="j", spec=make_spec(model), engine=engine)
        failed: dict[str, str] = {}
        request = PublishWeightsRequest(job_id="j", version=3)
        clients: Any = list(self.clients)
        sent = asyncio.run(asyncio.wait_for(self.broadcaster.publish(job, request, clients, failed), 10))
        return sent, failed


def test_one_that_fails_is_left_out_while_the_other_waits_for_buckets(
    tiny_qwen_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, waits = Client("sick", ReplicaFailure("INVALID_ARGUMENT: no such parameter")), Client("waits")
    sent, failed = Fleet(monkeypatch, waits, sick).publish(tiny_qwen_image)
    assert failed == {"sick": "INVALID_ARGUMENT: no such parameter"}
    assert sent is not None
    assert waits.verified == 3
    assert len(waits.groups) == 2


def test_one_that_does_not_come_to_the_group_is_left_out(tiny_qwen_image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    comes, absent = Client("comes"), Client("absent", is_absent=True)
    sent, failed = Fleet(monkeypatch, absent, comes).publish(tiny_qwen_image)
    assert failed.keys() == {"absent"}
    assert "have not come" in failed["absent"]
    assert sent is not None
    assert comes.verified == 3


def test_victims_alone_get_no_endless_attempts(tiny_qwen_image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    victims = [Client(name, ReplicaFailure("DATA_LOSS: broke off", is_victim=True)) for name in "ab"]
    sent, failed = Fleet(monkeypatch, *victims).publish(tiny_qwen_image)
    assert sent is None
    assert failed.keys() == {"a", "b"}
    assert [len(victim.groups) for victim in victims] == [broadcast.MAX_ATTEMPTS] * 2


async def test_a_replica_that_serves_the_same_bits_as_the_other_kind_of_weights_is_published_to_again() -> None:
    """The average of version 0 is the trained weights, and has their digest."""
    client = ReplicaClient(Replica(replica_id="a", address="127.0.0.1:1"), 0.0)
    for evaluated in (False, True):
        given = Published(0, {"w": 1}, 4, evaluated=evaluated)
        client.last_status = RolloutStatus(
            state=ROLLOUT_STATE_SERVING, job_id="j", evaluated=evaluated, weights_digest=given.digest
        )
        assert client.serves("j", given)
        assert not client.serves("j", replace(given, evaluated=not evaluated))
    await client.close()


async def test_an_adapter_that_no_broadcast_delivers_goes_as_a_blob(
    tiny_qwen_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the path if NCCL cannot connect."""
    clients = [Client(name, ReplicaFailure("DATA_LOSS: broke off", is_victim=True)) for name in "ab"]
    fleet = Fleet(monkeypatch, *clients)
    by_name = {client.replica_id: client for client in clients}
    monkeypatch.setattr(publish, "ReplicaClient", lambda replica, *_: by_name[replica.replica_id])
    monkeypatch.setattr(Broadcaster, "backend", lambda self, clients: "nccl")
    engine = SimpleNamespace(buckets=[], is_lora=True)
    record = SimpleNamespace(version=3)
    checkpoints = SimpleNamespace(fence=SimpleNamespace(attempt=1))
    fleet.worker.job = SimpleNamespace(
        inputs={}, job_id="j", spec=make_spec(tiny_qwen_image), engine=engine, record=record, checkpoints=checkpoints
    )
    request = PublishWeightsRequest(job_id="j", version=3, replicas=[Replica(replica_id=name) for name in "ab"])
    response = await Publisher(fleet.worker, fleet.runner, "127.0.0.1").publish(request, 60)
    assert [result.ok for result in response.results] == [True, True]
    assert [len(client.groups) for client in clients] == [broadcast.MAX_ATTEMPTS] * 2  # they were tried first
