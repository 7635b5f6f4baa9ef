"""Ranks that share samples (Ulysses) and copies of shards (HSDP) make the updates of one rank.

Full fine-tuning of layers before the split, inside it and at the gather shows scales that an adapter would not.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowfleet.job.spec import JobSpec
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.ranked import blobs_of, moments_of, prepare
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import make_worker, state_of
from tests.tiny_models import make_tiny

FULL: dict[str, Any] = {"trainer": {"mode": "full", "gradient_checkpointing": "full", "micro_batch_size": 1}}
NFT: dict[str, Any] = {
    "algorithm": {"name": "diffusion_nft", "num_noise_levels": 2, "kl_coef": 0.1},
    "rollout": {"num_frames": 5},
    "trainer": {"updates_per_step": 2},
}
DPO: dict[str, Any] = {
    "algorithm": {"name": "online_dpo", "num_noise_levels": 1, "beta": 10.0, "pairs_per_group": 1},
    "rollout": {"guidance_scale": 3.0},
    "trainer": {"mode": "full"},
}
SOUND: dict[str, Any] = {**FULL, "rollout": {"num_frames": 9, "sound_share": 0.5}}
JOBS = {"qwen_image": FULL, "wan_two_experts": NFT, "ltx2": SOUND, "flux2_klein": FULL, "flux": DPO}
MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"sequence": 2}],
    4: [{"replicate": 2}, {"replicate": 2, "sequence": 2}, {"sequence": 2}],
}
STEPS = 2


def job(model: Path, parts: dict[str, Any], world_size: int = 1, **mesh: int) -> JobSpec:
    trainer = {
        "optimizer": {"lr": 1e-2, "eps": 1e-1},
        "micro_batch_size": 2,
        "deterministic": False,
        **parts["trainer"],
    }
    return make_spec(model, **{**parts, "trainer": trainer | {"world_size": world_size, "mesh": mesh}})


def difference(moments: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative, of the first moments: averages of gradients, linear in them."""
    assert moments.keys() == expected.keys()
    names = [name for name in moments if name.startswith("exp_avg.")]
    mine, theirs = (torch.cat([part[name].double().flatten() for name in names]) for part in (moments, expected))
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.long
@pytest.mark.parametrize("world_size", MESHES)
def test_a_mesh_makes_the_updates_of_one_rank(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    alone: dict[str, Any] = {}
    folders: dict[Path, str] = {}
    for name, parts in JOBS.items():
        model = make_tiny(name, tmp_path / "models" / name)
        one = job(model, parts)
        for number, mesh in enumerate(MESHES[world_size]):
            folder = tmp_path / f"{name}-{number}"
            blobs, drawer = blobs_of(folder), Drawer(one)
            requests = [drawer.draw(blobs, step) for step in range(STEPS)]
            prepare(folder, job(model, parts, world_size, **mesh), requests)
            folders[folder] = name
            if name not in alone:
                worker = make_worker(one, ranks, blobs, tmp_path / f"{name}-one")
                metrics = [dict(worker.train(request).metrics) for request in requests]
                alone[name] = metrics, state_of(worker), moments_of(worker)
    torchrun(*folders, ranks=world_size)
    for folder, name in folders.items():
        metrics, state, moments = alone[name]
        together = json.loads((folder / "metrics.json").read_text())
        for mine, theirs in zip(metrics, together, strict=True):
            assert mine.keys() == theirs.keys()
            for metric in mine:
                if not metric.startswith(("timing", "perf", "rollout_corr/exact")):
                    assert theirs[metric] == pytest.approx(mine[metric], rel=1e-4, abs=1e-5), (folder.name, metric)
        theirs = load_file(folder / "published.safetensors")
        assert theirs.keys() == state.keys()
        for parameter, tensor in state.items():
            torch.testing.assert_close(
                theirs[parameter], tensor, rtol=1e-4, atol=1e-5, msg=f"{folder.name} {parameter}"
            )
        error = difference(load_file(folder / "moments.safetensors"), moments)
        print(f"{folder.name} of {world_size} ranks: gradients {error:.1e}")
        assert error < (3e-5 if name == "wan_two_experts" else 5e-6)  # NFT's two branches cancel all but a hundredth
        if world_size == 4 and name == "qwen_image":
            check_collectives(folder, MESHES[4][int(folder.name[-1])].get("replicate", 1))
    last = folders.popitem()[0]  # any world resumes it, and with any mesh
    resumed = make_worker(job(tmp_path / "models/flux", JOBS["flux"]), ranks, blobs_of(last), last)
    assert all(torch.equal(tensor, theirs[parameter]) for parameter, tensor in state_of(resumed).items())


def check_collectives(folder: Path, replicate: int) -> None:
    """No weight is gathered between copies, whose gradients are summed once an update: by one call an FSDP unit."""
    for rank in range(4):
        calls = json.loads((folder / f"collectives-{rank}.json").read_text())
        inside = [start for start in range(4) if start // (4 // replicate) == rank // (4 // replicate)]
        between = [other for other in range(4) if other % (4 // replicate) == rank % (4 // replicate)]
        assert all(ranks == inside for kind, ranks, _ in calls if kind != "all_reduce")
        scattered = [size for kind, _, size in calls if kind == "reduce_scatter_single"]
        assert len(scattered) > STEPS * len(set(scattered)), "an update has several backwards"
        summed = sorted(size for kind, ranks, size in calls if kind == "all_reduce" and ranks == between != inside)
        assert summed == ([] if replicate == 1 else sorted(STEPS * list(set(scattered))))
