"""float16: gradients that would vanish, against float32's; the scale against torch's GradScaler; skips and resume."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowfleet.algorithms.losses import Limits, PolicyRows, flow_grpo
from flowfleet.algorithms.sde import reverse_step
from flowfleet.data.blobs import SyncBlobs
from flowfleet.proto import trainer_pb2
from services.trainer.optim import loss_scale
from services.trainer.optim.loss_scale import LossScale
from services.trainer.parallel.ranks import Ranks
from services.trainer.step import kinds
from services.trainer.step.batches import plan_passes
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, state_of


def velocity_gradient(dtype: torch.dtype, num_rows: int, num_elements: int, scale: float) -> Tensor:
    """Gradient of one of `num_rows` rows, unscaled again, where a model that computes in `dtype` receives it."""
    generator = torch.Generator().manual_seed(1)
    x, v, noise = (torch.randn(1, num_elements, generator=generator) for _ in range(3))
    leaf = v.half().to(dtype).requires_grad_()  # the same velocity in both
    sigmas: dict[str, Any] = {"sigma": 0.7, "sigma_next": 0.6, "eta": 0.7, "sigma_max": 0.95}
    sample = reverse_step("sde")(x, v.half().float(), noise=noise, **sigmas).prev_sample
    log_prob = reverse_step("sde")(x, leaf.float(), prev_sample=sample, **sigmas).log_prob
    loss = flow_grpo(PolicyRows(log_prob, log_prob.detach(), torch.ones(1)), Limits(1e-5, 1.0)).loss
    (loss.sum() / num_rows * scale).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad.double() / scale


@pytest.mark.parametrize(("num_rows", "num_elements", "kept"), [(512, 65_536, 0.5), (8192, 16_384, 0.0)])
def test_a_scaled_gradient_is_float32s_but_for_rounding(num_rows: int, num_elements: int, kept: float) -> None:
    """At most `kept` of it is left without a scale."""
    exact = velocity_gradient(torch.float32, num_rows, num_elements, 1.0)
    assert velocity_gradient(torch.float16, num_rows, num_elements, 1.0).norm() <= kept * exact.norm()
    scale = LossScale(num_elements, is_on=True).before(num_rows)
    found = velocity_gradient(torch.float16, num_rows, num_elements, scale)
    bound = exact.abs() * 2**-11 + 2**-25 / scale  # half a unit in the last place, of normal and of subnormal numbers
    assert ((found - exact).abs() <= bound * 1.001).all()
    assert (found - exact).norm() <= 2**-11 * exact.norm()


def test_the_scale_follows_torchs_rule() -> None:
    ours = LossScale(1024, is_on=True)
    start = ours.before(64)
    assert start == 1024 * 64 / 16
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=loss_scale.GROWTH_INTERVAL)
    theirs.scale(torch.zeros(1))
    pattern = [True] * 450 + [False] * 3 + [True] * 199 + [False] + [True] * 401
    for is_finite in pattern:
        parameter.grad = torch.tensor([1.0 if is_finite else math.inf])
        theirs.step(optimizer)
        theirs.update()
        ours.after(is_finite=is_finite)
        assert ours.before(64) == theirs.get_scale()


def test_other_dtypes_have_no_scale() -> None:
    scale = LossScale(1024, is_on=False)
    scale.after(is_finite=False)
    assert scale.before(64) == 1.0
    assert scale.to_json() == {"scale": None, "num_finite": 0}


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("algorithm", [{"name": "flow_grpo"}, {"name": "diffusion_nft"}], ids=lambda part: part["name"])
def test_a_step_of_many_rows_has_float32s_gradient(
    algorithm: dict[str, Any],
    mode: str,
    tiny_qwen_image: Path,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sample weighs as if there were 10^5 times as many: unscaled, float16 loses all of it."""

    def crowded(*args: Any, **kwargs: Any) -> Any:
        plan = plan_passes(*args, **kwargs)
        return [[replace(update, num_samples=update.num_samples * 100_000) for update in part] for part in plan]

    monkeypatch.setattr(kinds, "plan_passes", crowded)
    trainer = {"mode": mode, "deterministic": False}
    specs = [
        make_spec(tiny_qwen_image, model={"dtype": dtype}, algorithm=algorithm, trainer=trainer)
        for dtype in ("float32", "float16")
    ]
    request = Drawer(specs[0]).draw(files, 0)
    norms = []
    for number, spec in enumerate(specs):
        metrics = make_worker(spec, ranks, files, tmp_path / str(number)).train(request).metrics
        assert metrics["actor/skipped_updates"] == 0.0
        assert ("actor/loss_scale" in metrics) is (number == 1)
        norms.append(metrics["actor/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_an_overflow_is_skipped_and_halves_the_scale_which_resumes(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, model={"dtype": "float16"})
    drawer = Drawer(spec)
    trained = make_worker(spec, ranks, files, tmp_path)
    engine_of(trained).loss_scale.scale = 2.0**50
    before = state_of(trained)
    metrics = trained.train(drawer.draw(files, 0)).metrics
    assert (metrics["actor/skipped_updates"], metrics["actor/loss_scale"]) == (1.0, 2.0**50)
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(trained).items())
    engine_of(trained).loss_scale.scale = 2.0**12
    assert trained.train(drawer.draw(files, 1)).metrics["actor/skipped_updates"] == 0.0
    trained.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert engine_of(resumed).loss_scale == LossScale(engine_of(trained).loss_scale.num_elements, True, 2.0**12, 1)
