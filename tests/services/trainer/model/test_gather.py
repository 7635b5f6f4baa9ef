"""Whole weights from three ranks' rows, against the tensors that were spread."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import Unavailable
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest
from flowfleet.weights import weights
from flowfleet.weights.transfer import GroupBroken
from services.trainer.model.gather import Gather
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.gathering import CPU, SIZE, no_memory_left, rank_main, tensors_of
from tests.services.trainer.steps import JOB, make_spec
from tests.services.trainer.workers import make_worker


def test_rows_of_three_ranks_come_together() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_main.__module__])  # three forks of one that has imported torch
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
    tensors = worker.job.engine.policies.weights(evaluated=False)
    gathers: list[Gather] = []

    def gather(*, evaluated: bool = False) -> Gather:
        del evaluated
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
    with pytest.raises(Unavailable, match="broadcast failed"):
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
