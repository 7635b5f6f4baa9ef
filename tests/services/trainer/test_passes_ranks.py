"""Passes, corrections over all rows and float16's scale on two ranks of torchrun against one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.step.test_update import shifted
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import make_worker, state_of

CORRECTION = {"mode": "truncated", "high": 2.0, "level": "sequence"}
JOBS: dict[str, dict[str, Any]] = {
    "float32": {
        "algorithm": {"name": "grpo_guard", "clip_range": 0.1, "correction": CORRECTION},
        "trainer": {"micro_batch_size": 1, "updates_per_step": 1},
    },
    "float16": {"model": {"dtype": "float16"}, "trainer": {"micro_batch_size": 2, "updates_per_step": 2}},
}
"""One update a pass: both ranks deal their samples to the updates that one rank deals them to."""


@pytest.mark.long
def test_two_ranks_make_the_passes_of_one(tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path) -> None:
    alone: dict[str, Any] = {}
    for name, parts in JOBS.items():
        trainer = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, "deterministic": False, "passes": 2, **parts["trainer"]}
        one, two = (
            make_spec(tiny_qwen_image, **{**parts, "trainer": trainer | {"world_size": size}}) for size in (1, 2)
        )
        blobs, drawer = blobs_of(tmp_path / name), Drawer(one)
        requests = [drawer.draw(blobs, step) for step in range(2)]
        for request in requests:
            shifted(request, blobs, 0, by=torch.tensor([1.0, 0.0]))
            shifted(request, blobs, 3, by=math.log(3))
        worker = make_worker(one, ranks, blobs, tmp_path / f"{name}-one")
        alone[name] = [dict(worker.train(request).metrics) for request in requests], state_of(worker)
        prepare(tmp_path / name, two, requests)
    torchrun(*(tmp_path / name for name in JOBS))
    together = {name: json.loads((tmp_path / name / "metrics.json").read_text()) for name in JOBS}

    for mine, theirs in zip(alone["float32"][0], together["float32"], strict=True):
        assert mine.keys() == theirs.keys()
        for metric in mine:
            if not metric.startswith(("timing", "perf")):
                assert theirs[metric] == pytest.approx(mine[metric], rel=1e-4, abs=1e-6), metric
    published = load_file(tmp_path / "float32" / "published.safetensors")
    for parameter, tensor in alone["float32"][1].items():
        torch.testing.assert_close(published[parameter], tensor, rtol=1e-4, atol=1e-5)

    first, halves = alone["float16"][0][0], together["float16"][0]  # other samples meet in later updates
    assert halves["actor/loss_scale"] == first["actor/loss_scale"] > 1
    assert halves["actor/skipped_updates"] == first["actor/skipped_updates"] == 0
    assert halves["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=0.1)
