"""Workers inside the test's process."""

from pathlib import Path

import torch

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from services.trainer.model.engine import Engine
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB


def make_worker(spec: JobSpec, ranks: Ranks, files: SyncBlobs, directory: Path) -> Worker:
    """Configured for `JOB`, from the newest checkpoint under `directory` if there is one."""
    worker = Worker(ranks, files)
    worker.configure(
        trainer_pb2.ConfigureRequest(
            job_id=JOB, spec_json=spec.model_dump_json(), directory=str(directory / "checkpoints")
        )
    )
    return worker


def engine_of(worker: Worker) -> Engine:
    assert worker.job is not None
    return worker.job.engine


def trained_of(worker: Worker) -> dict[str, torch.Tensor]:
    """What it trains, whole and fp32, by published name. For a world of one."""
    return {name: local(parameter).clone() for name, parameter in engine_of(worker).trained.items()}


def state_of(worker: Worker, *, evaluated: bool = False) -> dict[str, torch.Tensor]:
    """What it would publish."""
    return {name: tensor.clone() for name, tensor in engine_of(worker).full_tensors(evaluated=evaluated)}
