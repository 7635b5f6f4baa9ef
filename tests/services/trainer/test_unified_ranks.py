"""HunyuanImage-3.0 on two ranks that share its experts: the updates of one rank, and checkpoints for either."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.job.spec import JobSpec
from recipes.tiny_unified.hunyuan_image3 import CONFIG
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import make_worker, state_of
from tests.tiny_models import make_tiny

MODES = ("lora", "full")


def job(model: Path, mode: str, world_size: int) -> JobSpec:
    trainer: dict[str, Any] = {
        "mode": mode,
        "world_size": world_size,
        "sharding": "fsdp",
        "deterministic": False,
        "micro_batch_size": 1,
        "updates_per_step": 2,
        "gradient_checkpointing": "full",
        "optimizer": {"lr": 1e-2 if mode == "lora" else 1e-3, "eps": 1e-3},
    }
    return make_spec(model, trainer=trainer)


@pytest.mark.long
def test_two_ranks_that_share_the_experts_make_the_updates_of_one_and_resume(ranks: Ranks, tmp_path: Path) -> None:
    model = make_tiny("hunyuan_image3", tmp_path / "model")
    alone: dict[str, list[tuple[dict[str, float], dict[str, Tensor]]]] = {}
    for mode in MODES:
        spec, first, later = job(model, mode, 1), tmp_path / f"{mode}-first", tmp_path / f"{mode}-later"
        drawer = Drawer(spec)
        requests = [drawer.draw(blobs_of(later), step) for step in range(2)]
        worker = make_worker(spec, ranks, blobs_of(later), tmp_path / f"{mode}-one")
        alone[mode] = [(dict(worker.train(request).metrics), state_of(worker)) for request in requests]
        prepare(first, job(model, mode, 2), [drawer.draw(blobs_of(first), 0)])
        prepare(later, job(model, mode, 2), requests)
        (later / "step-0.bin").unlink()
    torchrun(*(tmp_path / f"{mode}-first" for mode in MODES))
    for mode in MODES:
        made, place = tmp_path / f"{mode}-first", Path("checkpoints", "step-00000001")
        shutil.copytree(made / place, tmp_path / f"{mode}-later" / place)
    torchrun(*(tmp_path / f"{mode}-later" for mode in MODES))
    for mode in MODES:
        for step, name in enumerate(("first", "later")):
            folder = tmp_path / f"{mode}-{name}"
            assert_half_of_the_experts_each(folder)
            assert_same(folder, *alone[mode][step])
        resumed = make_worker(job(model, mode, 1), ranks, blobs_of(folder), folder)  # from what two ranks saved
        saved = load_file(folder / "published.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in state_of(resumed).items())


def assert_half_of_the_experts_each(folder: Path) -> None:
    """Rank 0 holds the first half of a layer's experts, whole, and rank 1 the other."""
    held = [json.loads((folder / f"shards-{rank}.json").read_text()) for rank in range(2)]
    experts = [name for name in held[0] if ".experts." in name]
    assert len(experts) == 2 * CONFIG["num_hidden_layers"]
    for name in experts:
        assert [shapes[name][0] for shapes in held] == [CONFIG["num_experts"] // 2] * 2
        assert held[0][name][1:] == held[1][name][1:]


def assert_same(folder: Path, metrics: dict[str, float], state: dict[str, Tensor]) -> None:
    """Metrics of the last step and weights are equal but for the order of float32 sums."""
    theirs = json.loads((folder / "metrics.json").read_text())[-1]
    for metric, value in metrics.items():
        if not metric.startswith(("timing", "perf")):
            assert theirs[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
    published = load_file(folder / "published.safetensors")
    assert published.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(published[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
