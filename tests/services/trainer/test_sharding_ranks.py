"""Two ranks that hold a whole base each against two that share it: the same updates, and checkpoints for either."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowfleet.job.spec import JobSpec
from services.trainer.checkpoints.files import stored_shapes
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun

WAYS = ("replicate", "fsdp")


def job(model: Path, sharding: str) -> JobSpec:
    trainer: dict[str, Any] = {
        "world_size": 2,
        "sharding": sharding,
        "deterministic": False,
        "micro_batch_size": 1,
        "updates_per_step": 2,
        "ema": {"decay": 0.5},
        "optimizer": {"lr": 1e-2, "eps": 1e-3},
    }
    return make_spec(model, trainer=trainer)


@pytest.mark.long
def test_replicas_make_the_updates_of_shards_and_resume_from_each_other(tiny_qwen_image: Path, tmp_path: Path) -> None:
    specs = {way: job(tiny_qwen_image, way) for way in WAYS}
    drawer = Drawer(specs["fsdp"])

    def folder(name: str, way: str, steps: range, resumes: str = "") -> Path:
        made = tmp_path / name
        prepare(made, specs[way], [drawer.draw(blobs_of(made), step) for step in range(steps.stop)])
        for step in range(steps.start):
            (made / f"step-{step}.bin").unlink()
        if resumes:
            shutil.copytree(
                tmp_path / resumes / "checkpoints" / "step-00000001", made / "checkpoints" / "step-00000001"
            )
        return made

    torchrun(*(folder(way, way, range(1)) for way in WAYS), folder("both", "fsdp", range(2)))
    shapes = [stored_shapes(tmp_path / way / "checkpoints" / "step-00000001") for way in WAYS]
    assert shapes[0] == shapes[1]
    torchrun(
        folder("replicate-later", "replicate", range(1, 2), "fsdp"),
        folder("fsdp-later", "fsdp", range(1, 2), "replicate"),
    )

    same(tmp_path, "replicate", "fsdp", 0)
    for later in ("replicate-later", "fsdp-later"):
        same(tmp_path, later, "both", 1)


def same(folder: Path, first: str, second: str, step: int) -> None:
    """Weights, averages, moments and the metrics of a step: equal but for the order of float32 sums."""
    for kind in ("published", "evaluated", "moments"):
        mine, theirs = (load_file(folder / name / f"{kind}.safetensors") for name in (first, second))
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
    ours = json.loads((folder / first / "metrics.json").read_text())[-1]
    expected = json.loads((folder / second / "metrics.json").read_text())[step]
    for metric, value in expected.items():
        if not metric.startswith(("timing", "perf")):
            assert ours[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
