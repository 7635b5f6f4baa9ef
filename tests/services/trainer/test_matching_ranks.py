"""Matching losses on two ranks of torchrun against one: noise, pairs, old policy and experts hang on no rank."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowfleet.job.spec import JobSpec
from services.trainer.parallel.ranks import Ranks
from tests.forks import start
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import make_worker, state_of
from tests.tiny_models import make_tiny

NFT: dict[str, Any] = {
    "algorithm": {
        "name": "diffusion_nft",
        "num_noise_levels": 3,
        "kl_coef": 0.1,
        "old_policy": {"rate": 0.5, "max": 0.5},
        "sigma_low": 0.7,
    },
    "rollout": {"num_frames": 5},
    "trainer": {"updates_per_step": 2, "micro_batch_size": 2},
}
DPO: dict[str, Any] = {
    "algorithm": {"name": "online_dpo", "num_noise_levels": 2, "beta": 10.0, "pairs_per_group": 1},
    "rollout": {"guidance_scale": 3.0, "guidance_interval": [0.0, 0.5]},
    "trainer": {"mode": "full", "micro_batch_size": 2},
}
DGPO: dict[str, Any] = {
    "algorithm": {"name": "dgpo", "num_noise_levels": 2, "old_policy": {"rate": 0.5, "max": 0.5}, "kl_coef": 0.1},
    "trainer": {"micro_batch_size": 2},
}
STEPS = 3


def worlds(model: Path, parts: dict[str, Any]) -> tuple[JobSpec, JobSpec]:
    """The same job for one rank and for two."""
    trainer = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, **parts["trainer"]}
    one, two = (make_spec(model, **{**parts, "trainer": trainer | {"world_size": size}}) for size in (1, 2))
    return one, two


def torchrun(*folders: Path, ranks: int = 2) -> None:
    """The ranks need what the test session has set: the CPU, one thread."""
    command = [sys.executable, "-m", "tests.services.trainer.ranked", *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWFLEET_DEVICE": "cpu"}
    assert start(command, env=environment, output=2, ranks=ranks).wait(300) == 0


@pytest.mark.long
def test_two_ranks_make_the_update_of_one(tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path) -> None:
    """NFT on two experts with an adapter, pairs with full weights, and groups; three pairs or groups leave one rank
    with padding. Pairs' noise levels lie inside of guidance's interval on one rank and outside on the other."""
    jobs = {
        "nft": (make_tiny("wan_two_experts", tmp_path / "wan"), NFT),
        "dpo": (tiny_qwen_image, DPO),
        "dgpo": (tiny_qwen_image, DGPO),
    }
    alone: dict[str, Any] = {}
    for name, (model, parts) in jobs.items():
        one, two = worlds(model, parts)
        blobs, drawer = blobs_of(tmp_path / name), Drawer(one)
        worker = make_worker(one, ranks, blobs, tmp_path / f"{name}-one")
        requests = [drawer.draw(blobs, step) for step in range(STEPS)]
        metrics = [dict(worker.train(request).metrics) for request in requests]
        alone[name] = metrics, {"published": state_of(worker), "evaluated": state_of(worker, evaluated=True)}
        prepare(tmp_path / name, two, requests)
    torchrun(*(tmp_path / name for name in jobs))
    for name, (metrics, states) in alone.items():
        together = json.loads((tmp_path / name / "metrics.json").read_text())
        for mine, theirs in zip(metrics, together, strict=True):
            assert mine.keys() == theirs.keys()
            for metric in mine:
                if not metric.startswith(("timing", "perf")):
                    assert theirs[metric] == pytest.approx(mine[metric], rel=1e-4, abs=1e-6), metric
        for kind, state in states.items():
            theirs = load_file(tmp_path / name / f"{kind}.safetensors")
            assert theirs.keys() == state.keys()
            for parameter, tensor in state.items():
                torch.testing.assert_close(theirs[parameter], tensor, rtol=1e-4, atol=1e-5)

    one, _ = worlds(jobs["nft"][0], NFT)  # what two ranks saved, one rank resumes, with its old policy and its average
    resumed = make_worker(one, ranks, blobs_of(tmp_path / "nft"), tmp_path / "nft")
    for kind, state in (("published", state_of(resumed)), ("evaluated", state_of(resumed, evaluated=True))):
        saved = load_file(tmp_path / "nft" / f"{kind}.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())
