"""Training by VeOmni, in its own environment (`make veomni`), against the trainer's own engine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.parallel.ranks import Ranks
from tests.forks import start
from tests.services.trainer.ranked import blobs_of, moments_of, prepare
from tests.services.trainer.sequences import Writer, make_spec
from tests.services.trainer.test_mesh_ranks import difference
from tests.services.trainer.workers import make_worker, state_of
from tests.tiny_models.text import save_text_model

PYTHON = Path(__file__).parents[3] / ".venv-veomni/bin/python"
STEPS = 2
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("full", {}),
    "experts": ("full", {}),
    "adapter": ("lora", {}),
    "checkpointed": ("full", {"gradient_checkpointing": "full"}),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.is_file(), reason="VeOmni is not installed: make veomni"),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_are_those_of_fsdp(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    """Float32. Losses and gradients within 1e-5, and its checkpoints resume under the other engine."""
    alone: dict[str, Any] = {}
    for name, (mode, trainer) in JOBS.items():
        model = save_text_model(tmp_path / "models" / name, "experts" if name == "experts" else "dense")
        parts = {
            "mode": mode,
            "optimizer": {"lr": 1e-2, "eps": 1e-1},
            "micro_batch_tokens": 24,
            "threads": 1,
            **trainer,
        }
        one = make_spec(model, trainer=parts)
        theirs = make_spec(model, trainer=parts | {"backend": "veomni", "world_size": world_size})
        folder = tmp_path / name
        blobs, writer = blobs_of(folder), Writer(one)
        requests = [writer.write(blobs, step) for step in range(STEPS)]
        prepare(folder, theirs, requests)
        worker = make_worker(one, ranks, blobs, tmp_path / f"{name}-one")
        metrics = [dict(worker.train(request).metrics) for request in requests]
        alone[name] = metrics, state_of(worker), moments_of(worker)
    command = [str(PYTHON), "-m", "tests.services.trainer.ranked", *(str(tmp_path / name) for name in JOBS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWFLEET_DEVICE": "cpu"}
    assert start(command, env=environment, output=2, ranks=world_size).wait(300) == 0
    for name, (metrics, state, moments) in alone.items():
        for mine, theirs in zip(metrics, json.loads((tmp_path / name / "metrics.json").read_text()), strict=True):
            assert mine.keys() == theirs.keys()
            for metric in ("actor/loss", "actor/grad_norm", "actor/ratio_mean"):
                assert theirs[metric] == pytest.approx(mine[metric], rel=1e-5, abs=1e-6), (name, metric)
        published = load_file(tmp_path / name / "published.safetensors")
        assert published.keys() == state.keys()
        error = difference(load_file(tmp_path / name / "moments.safetensors"), moments)
        print(f"{name}, {world_size} ranks: gradients {error:.1e}")
        assert error < 1e-5
        plain = make_spec(tmp_path / "models" / name, trainer={"mode": JOBS[name][0]})
        resumed = make_worker(plain, ranks, blobs_of(tmp_path / name), tmp_path / name)
        assert all(torch.equal(tensor, published[parameter]) for parameter, tensor in state_of(resumed).items())
