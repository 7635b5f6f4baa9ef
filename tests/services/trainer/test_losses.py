"""Every loss, with an adapter and with full weights, against plain PyTorch: two steps of two updates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.algorithms.registry import LOSSES
from flowfleet.data.blobs import SyncBlobs
from services.controller.job.commands.train import taught_nothing
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local
from tests.services.trainer.oracle import Oracle
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, trained_of

ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"name": "flow_grpo", "clip_range": 1e-4},
    "grpo_guard": {"name": "grpo_guard", "clip_range": 1e-4},
    "flow_dppo": {"name": "flow_dppo", "kl_threshold": 1e-6},
    "diffusion_nft": {"name": "diffusion_nft", "num_noise_levels": 2, "old_policy": {"rate": 0.5, "max": 0.5}},
    "awm": {"name": "awm", "num_noise_levels": 2, "clip_range": 0.01},
    "elbo_pg": {"name": "elbo_pg", "num_noise_levels": 2, "beta": 1.0},
    "dgpo": {"name": "dgpo", "num_noise_levels": 2, "old_policy": {"rate": 0.5, "max": 0.5}},
    "crd": {"name": "crd", "num_noise_levels": 2},
    "dpo": {"name": "online_dpo", "num_noise_levels": 2, "beta": 10.0},
}
"""Settings by loss."""
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}
"""Larger eps: with a tiny one, AdamW's first steps have the size lr whatever the gradient, and rounding would decide
their sign."""


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("loss", ALGORITHMS)
def test_two_steps_equal_plain_pytorch(
    loss: str, mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Covers guidance, and a tie to the reference where the loss has one."""
    algorithm = ALGORITHMS[loss] | ({"kl_coef": 0.01} if LOSSES[loss].model.reads("kl_coef") else {})
    spec = make_spec(
        tiny_qwen_image,
        algorithm=algorithm,
        rollout={"guidance_scale": 2.0} if mode == "lora" else {},
        trainer={"mode": mode, "optimizer": OPTIMIZER, "updates_per_step": 2},
    )
    assert spec.algorithm.loss == loss
    worker, oracle, drawer = make_worker(spec, ranks, files, tmp_path), Oracle(spec, files), Drawer(spec)
    before = trained_of(worker)
    for step in range(2):
        request = drawer.draw(files, step)
        metrics, losses = worker.train(request).metrics, oracle.train(request)
        assert metrics["actor/loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    after, expected = trained_of(worker), oracle.state()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(moved) > len(after) / 3
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
    if LOSSES[loss].kind == "policy":
        assert metrics["actor/pg_clipfrac"] > 0  # the limit was met


@pytest.mark.parametrize(
    ("loss", "dtype", "mode"),
    [
        *((loss, "float32", "lora") for loss in ALGORITHMS),
        ("flow_grpo", "bfloat16", "full"),
        ("flow_grpo", "float16", "lora"),
        ("diffusion_nft", "float16", "lora"),
    ],
)
def test_a_step_without_a_finite_gradient_is_told(
    loss: str, dtype: str, mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """A frozen or a trained weight of NaN reaches every gradient. A loss scale that is too large is another thing."""
    model, trainer = {"path": str(tiny_qwen_image), "dtype": dtype}, {"mode": mode, "updates_per_step": 2}
    spec = make_spec(tiny_qwen_image, model=model, algorithm=ALGORITHMS[loss], trainer=trainer)
    worker, request = make_worker(spec, ranks, files, tmp_path), Drawer(spec).draw(files, 0)
    engine = engine_of(worker)
    if dtype == "float16":
        engine.loss_scale.scale = 2.0**60
        assert not taught_nothing(worker.train(request).metrics)
        request = Drawer(spec).draw(files, 1)
    with torch.no_grad():
        local(next(p for p in engine.experts["transformer"].parameters() if p.ndim > 1)).fill_(torch.nan)
    metrics = worker.train(request).metrics
    assert metrics["actor/skipped_updates"] == 2.0
    assert taught_nothing(metrics)


def test_every_loss_on_latents_is_here() -> None:
    """Losses on gradients of rewards are in test_gradient_rewards.py."""
    assert sorted(ALGORITHMS) == sorted(name for name, loss in LOSSES.items() if loss.kind in ("policy", "matching"))


GARDO = {"kl_gate": {"rewards": ["taste"]}, "kl_coef": 0.5}


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("flow_grpo", {}),
        ("flow_grpo", GARDO),
        ("crd", GARDO),
        ("grpo_guard", {}),
        ("flow_grpo", {"step_weights": "noise"}),
        ("diffusion_nft", {}),
        ("diffusion_nft", {"sigma_sampling": "schedule", "num_noise_levels": 3}),  # six rounds, four levels
        ("dgpo", {}),
    ],
)
def test_passes_and_a_schedule_equal_plain_pytorch(
    loss: str, changes: dict[str, object], tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Old policy and reference are those before the step in every pass; noise is new in each."""
    rewards: dict[str, Any] = {"ocr": {}, "taste": {"weight": 0.0}}
    optimizer = OPTIMIZER | {"lr_schedule": "linear", "warmup_updates": 3}
    spec = make_spec(
        tiny_qwen_image,
        algorithm=ALGORITHMS[loss] | {"kl_coef": 0.01} | changes,
        rewards=rewards,
        schedule={"steps": 3},
        trainer={"optimizer": optimizer, "updates_per_step": 2, "passes": 2, "deterministic": loss == "flow_grpo"},
    )
    worker, oracle, drawer = make_worker(spec, ranks, files, tmp_path), Oracle(spec, files), Drawer(spec)
    for step in range(2):
        request = drawer.draw(files, step)
        metrics, losses = worker.train(request).metrics, oracle.train(request)
        assert metrics["actor/loss"] == pytest.approx(sum(losses) / 4, rel=1e-4, abs=1e-6)
    assert metrics["actor/lr"] == pytest.approx(OPTIMIZER["lr"] * (12 - 7) / (12 - 3))
    for name, tensor in oracle.state().items():
        torch.testing.assert_close(trained_of(worker)[name], tensor, rtol=1e-4, atol=1e-5)
