"""Trains prepared steps on all ranks of torchrun, without a service: `-m tests.services.trainer.ranked FOLDER…`.

Each folder is a job: `spec.json` and `step-0.bin`, `step-1.bin`, … (TrainStepRequests). Rank 0 writes `metrics.json`, a
list with an entry a step, `published.safetensors` and `moments.safetensors`; every rank R writes `shards-R.json`, the
shapes of what it holds of each parameter, and `collectives-R.json`, of its training: [kind, ranks, elements] of each.
Checkpoints go to `checkpoints`, and from the newest one there the job resumes. Blobs are under `blobs`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from flowfleet.data.blobs import FsspecBlobs, SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from services.trainer.model.loading import plain_name
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB
from tests.services.trainer.workers import engine_of, state_of


def blobs_of(folder: Path) -> SyncBlobs:
    return FsspecBlobs(f"file://{folder}/blobs")


def moments_of(worker: Worker) -> dict[str, torch.Tensor]:
    """Collective. Whole, as they are kept, by the names that a checkpoint has."""
    spread: dict[str, Any] = engine_of(worker).optimizer.moments()
    return {name: tensor.full_tensor().clone() for name, tensor in spread.items()}


def prepare(folder: Path, spec: JobSpec, requests: list[trainer_pb2.TrainStepRequest]) -> None:
    """Writes a job's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    for step, request in enumerate(requests):
        (folder / f"step-{step}.bin").write_bytes(request.SerializeToString())


def train(folder: Path, ranks: Ranks, blobs: SyncBlobs) -> None:
    """Collective. Trains a folder's job."""
    worker = Worker(ranks, blobs)
    text = (folder / "spec.json").read_text()
    worker.configure(trainer_pb2.ConfigureRequest(job_id=JOB, spec_json=text, directory=str(folder / "checkpoints")))
    named = [pair for expert in engine_of(worker).experts.values() for pair in expert.named_parameters()]
    held = {plain_name(name): list(local(parameter).shape) for name, parameter in named}  # experts of a job are alike
    (folder / f"shards-{ranks.rank}.json").write_text(json.dumps(held))
    files = sorted(folder.glob("step-*.bin"))
    requests = [trainer_pb2.TrainStepRequest.FromString(file.read_bytes()) for file in files]
    with counted() as calls:
        metrics = [dict(worker.train(request).metrics) for request in requests]
    (folder / f"collectives-{ranks.rank}.json").write_text(json.dumps(calls))
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    sampling, evaluated = state_of(worker), state_of(worker, evaluated=True)
    moments = moments_of(worker)
    if ranks.rank == 0:
        save_file(moments, folder / "moments.safetensors")
        save_file(sampling, folder / "published.safetensors")
        save_file(evaluated, folder / "evaluated.safetensors")
        (folder / "metrics.json").write_text(json.dumps(metrics))


COUNTED = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "all_reduce")


@contextmanager
def counted() -> Iterator[list[tuple[str, list[int], int]]]:
    """Collects the collectives that are called inside: kind, ranks and the elements of the first tensor."""
    calls: list[tuple[str, list[int], int]] = []

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
            calls.append((name, dist.get_process_group_ranks(kwargs.get("group")), tensor.numel()))
            return call(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in filter(lambda name: hasattr(dist, name), COUNTED):
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        yield calls


def main() -> None:
    ranks = Ranks()
    for folder in map(Path, sys.argv[1:]):
        train(folder, ranks, blobs_of(folder))
    ranks.close()


if __name__ == "__main__":
    main()
