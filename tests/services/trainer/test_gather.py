"""Whole weights from three ranks' rows, against the tensors that were spread."""

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flowfleet import weights
from flowfleet.blobs import SyncBlobs
from flowfleet.errors import Unavailable
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest
from flowfleet.transfer import GroupBroken
from services.trainer.gather import Gather
from services.trainer.ranks import Ranks
from tests.services.trainer.steps import JOB, make_spec
from tests.services.trainer.workers import make_worker

SIZE = 3
CPU = torch.device("cpu")
SHAPES = {
    "even": (12, 4),
    "uneven": (7, 3),
    "two": (2, 5),
    "one": (1, 2, 3),
    "short": (4,),
    "whole": (5, 5),
    "big": (50,),
}


def tensors_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but `whole`, by rows."""
    mesh = init_device_mesh("cpu", (SIZE,))
    return {
        name: tensor if name == "whole" else distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in tensors.items()
    }


def no_memory_left(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("too little memory")


def rank_main(rank: int, port: int, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    torch.set_num_threads(1)
    gather = Gather(spread(tensors_of()), torch.bfloat16, CPU, bucket_bytes=150)
    whole = dict(gather.tensors())
    again = Gather(spread(tensors_of()), torch.bfloat16, CPU, bucket_bytes=150)
    if rank == 0:
        first = again.buckets[0]
        flat = torch.empty(weights.bucket_bytes(first), dtype=torch.uint8)
        allocate, torch.empty = torch.empty, no_memory_left  # there was enough for all collectives before the first
        again.fill(first, flat)
        torch.empty = allocate
        whole["first"] = flat
    again.rest()  # the other ranks want nothing of it
    results.put((rank, len(gather.buckets), {name: tensor.float().tolist() for name, tensor in whole.items()}))
    dist.barrier()
    dist.destroy_process_group()


def test_rows_of_three_ranks_come_together() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    workers = [context.Process(target=rank_main, args=(rank, store.port, results)) for rank in range(SIZE)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of().items()}
    for _, num_buckets, whole in got:
        assert num_buckets > 2
        for name, tensor in expected.items():
            assert whole[name] == tensor.float().tolist(), name
    bucket = weights.make_buckets(weights.specs_of(expected), 150)[0]
    flat = torch.tensor(next(whole["first"] for rank, _, whole in got if rank == 0)).to(torch.uint8)
    for spec, view in weights.views(bucket, flat):
        assert torch.equal(view, expected[spec.name])


class Member:
    """Rank 0 of a group that breaks at the second bucket."""

    device = CPU

    def __init__(self) -> None:
        self.sent = 0

    def broadcast(self, flat: torch.Tensor) -> "Member":
        self.sent += 1
        if self.sent == 2:
            raise GroupBroken("another member is gone")
        return self

    def wait(self) -> None:
        pass


def test_a_broken_broadcast_keeps_the_ranks_in_step_and_a_failed_gather_ends_them(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(make_spec(tiny_qwen_image, trainer={"mode": "full"}), ranks, files, tmp_path)
    request = PublishWeightsRequest(job_id=JOB, version=0)
    assert worker.job is not None
    tensors = worker.job.engine.policies.sampling()
    gathers: list[Gather] = []

    def gather() -> Gather:
        gathers.append(Gather(tensors, torch.float32, CPU, bucket_bytes=20_000))
        return gathers[-1]

    monkeypatch.setattr(worker.job.engine, "gather", gather)
    filled: list[int] = []
    fill = Gather.fill

    def counted(self: Gather, bucket: Any, flat: Any) -> None:
        filled.append(self.buckets.index(bucket))
        fill(self, bucket, flat)

    monkeypatch.setattr(Gather, "fill", counted)
    member: Any = Member()
    worker.member = member
    with pytest.raises(Unavailable, match="broke off"):
        worker.send_weights(request)
    assert len(gathers[0].buckets) > 3
    assert filled == list(range(len(gathers[0].buckets)))  # each once, to the end

    def fails(self: Gather, bucket: Any, flat: Any) -> None:
        filled.append(self.buckets.index(bucket))
        no_memory_left()

    filled.clear()
    monkeypatch.setattr(Gather, "fill", fails)
    with pytest.raises(torch.OutOfMemoryError):
        worker.send_weights(request)
    assert filled == [0]
