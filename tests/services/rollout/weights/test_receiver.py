"""Whose fault a failed weight transfer is, as the trainer hears it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.errors import Conflict, DataLoss
from flowfleet.job.fingerprints import CHANGED, fingerprint
from flowfleet.peers import Peers
from flowfleet.proto import rollout_pb2
from flowfleet.weights.transfer import GroupBroken, TransferMember, TransferStore
from flowfleet.weights.weights import Member
from services.rollout.weights.receiver import WeightReceiver
from services.rollout.weights.state import WeightState

CPU = torch.device("cpu")


class Engine:
    """Prepares nothing and fails to receive."""

    device = CPU

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    async def prepare(self, model: Any, lora: Any) -> None:
        pass

    async def receive(self, member: Member, buckets: Sequence[rollout_pb2.Bucket]) -> None:
        raise self.failure


def receiver_with(failure: Exception) -> WeightReceiver:
    async def settled() -> None:
        pass

    engine, blobs = Engine(failure), object()
    return WeightReceiver(engine, WeightState(), blobs, settled, Peers(None))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Folder of a model, as far as a binding reads it."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    return str(tmp_path)


def init_request(folder: str, port: int, size: int, timeout_s: float) -> rollout_pb2.InitWeightTransferRequest:
    group = rollout_pb2.TransferGroup(
        group_id="g",
        backend="gloo",
        store_host="127.0.0.1",
        store_port=port,
        rank=1,
        world_size=size,
        timeout_s=timeout_s,
    )
    model = rollout_pb2.ModelSpec(path=folder, dtype="float32")
    return rollout_pb2.InitWeightTransferRequest(job_id="job", model=model, group=group)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (GroupBroken("another member is gone"), DataLoss),
        (torch.OutOfMemoryError("too little memory"), torch.OutOfMemoryError),
        (RuntimeError("illegal address"), RuntimeError),
    ],
)
async def test_only_a_broken_group_makes_a_replica_a_victim(
    failure: Exception, told: type[Exception], folder: str
) -> None:
    store = TransferStore("127.0.0.1", 20)
    receiver = receiver_with(failure)
    request = init_request(folder, store.port, 2, 20)
    theirs = rollout_pb2.TransferGroup()
    theirs.CopyFrom(request.group)
    theirs.rank = 0
    trainer, _ = await asyncio.gather(
        asyncio.to_thread(TransferMember.join, theirs, CPU, store), receiver.init(request)
    )
    await receiver.start(rollout_pb2.StartWeightUpdateRequest(job_id="job", version=1))
    source = rollout_pb2.Broadcast(group_id="g")
    update = rollout_pb2.UpdateWeightsRequest(job_id="job", version=1, broadcast=source)
    with pytest.raises(told) as caught:
        await receiver.update(update)
    assert type(caught.value) is told
    trainer.close()


async def test_a_model_that_was_changed_since_the_job_began_is_refused(folder: str) -> None:
    """What the replica holds already is the job's own, whatever lies there now."""
    receiver, file = receiver_with(ValueError()), Path(folder) / "model_index.json"
    model = rollout_pb2.ModelSpec(path=folder, dtype="float32", fingerprint=fingerprint(folder))
    init = rollout_pb2.InitWeightTransferRequest(job_id="job", model=model)
    await receiver.init(init)
    file.write_text(file.read_text() + " ")
    await receiver.init(init)
    with pytest.raises(Conflict, match=f"{folder} {CHANGED}"):
        await receiver_with(ValueError()).init(init)
    model.fingerprint = "0:of another release"
    await receiver_with(ValueError()).init(rollout_pb2.InitWeightTransferRequest(job_id="job", model=model))


async def test_an_absent_peer_and_an_unreachable_store_are_told_apart(folder: str) -> None:
    store = TransferStore("127.0.0.1", 1)
    receiver = receiver_with(ValueError())
    with pytest.raises(DataLoss, match=r"ranks \[0, 2\] of 3 have not come"):
        await receiver.init(init_request(folder, store.port, 3, 0.5))
    with pytest.raises(RuntimeError) as caught:
        await receiver.init(init_request(folder, 1, 3, 0.5))  # nothing listens there
    assert not isinstance(caught.value, GroupBroken)


async def test_a_trainer_that_was_replaced_is_refused_in_every_phase(folder: str) -> None:
    """And the newer one's update continues."""
    model = rollout_pb2.ModelSpec(path=folder, dtype="float32")
    receiver = receiver_with(ValueError())
    init = rollout_pb2.InitWeightTransferRequest(job_id="job", model=model)
    phases: list[tuple[Any, Any]] = [
        (receiver.init, init),
        (receiver.start, rollout_pb2.StartWeightUpdateRequest(job_id="job", version=1)),
        (receiver.update, rollout_pb2.UpdateWeightsRequest(job_id="job", version=1)),
        (receiver.finish, rollout_pb2.FinishWeightUpdateRequest(job_id="job", version=1)),
    ]
    init.attempt = 7
    await receiver.init(init)
    for phase, request in phases:
        request.attempt = 6
        with pytest.raises(Conflict, match="trainer 6 of job job was replaced by trainer 7"):
            await phase(request)
    start = rollout_pb2.StartWeightUpdateRequest(job_id="job", version=1, attempt=7)
    await receiver.start(start)
