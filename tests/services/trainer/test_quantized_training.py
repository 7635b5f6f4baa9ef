"""Full training with float8 products: the policy of quantized rollouts, updates close to plain ones, on any ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from flowfleet.quantization import layers
from services.rollout.engines.acceleration import blocks
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.ranked import blobs_of, moments_of, prepare
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import engine_of, make_worker, state_of


def job(model: Path, quantization: str, **trainer: Any) -> JobSpec:
    settings = {"mode": "full", "quantization": quantization, **trainer}
    return make_spec(model, model={"dtype": "bfloat16"}, rollout={"quantization": quantization}, trainer=settings)


@pytest.fixture(autouse=True)
def _small_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    monkeypatch.setenv("FLOWFLEET_FP8_MIN_SIZE", "16")


def drawer_of(spec: JobSpec) -> Drawer:
    drawer = Drawer(spec)
    assert layers.add_copies(blocks(drawer.adapter.transformer).values()) > 0
    return drawer


def first_gradient(moments: dict[str, Tensor]) -> Tensor:
    """The gradient of the first update, times a factor, in one vector."""
    return torch.cat([moments[name].double().flatten() for name in sorted(moments) if "exp_avg_sq" not in name])


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def test_the_trainer_recomputes_quantized_log_probs_and_updates_almost_as_without(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Log-probs bit for bit. What is trained, published and resumed has the names, shapes and dtypes of plain jobs."""
    spec, plain = job(tiny_qwen_image, "fp8"), job(tiny_qwen_image, "none", deterministic=False)
    request = drawer_of(spec).draw(files, 0)
    worker, other = (make_worker(each, ranks, files, tmp_path / each.trainer.quantization) for each in (spec, plain))
    metrics, plain_metrics = (each.train(request).metrics for each in (worker, other))
    assert metrics["rollout_corr/ratio_max_abs_dev"] == 0
    assert metrics["actor/grad_norm"] == pytest.approx(plain_metrics["actor/grad_norm"], rel=0.05)
    assert any(isinstance(module, layers.Fp8Trained) for module in engine_of(worker).experts["transformer"].modules())
    assert cosine(*(first_gradient(moments_of(each)) for each in (worker, other))) > 0.995
    published, expected = state_of(worker), state_of(other)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in published.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    resumed = state_of(make_worker(plain, ranks, files, tmp_path / "fp8"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in published.items())


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_two_ranks_make_the_update_of_one(
    checkpointing: str, tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": checkpointing, "micro_batch_size": 1, "deterministic": False}
    one, two = (job(tiny_qwen_image, "fp8", world_size=size, **settings) for size in (1, 2))
    folder = tmp_path / "two"
    request = drawer_of(one).draw(blobs_of(folder), 0)
    worker = make_worker(one, ranks, blobs_of(folder), tmp_path / "one")
    worker.train(request)
    prepare(folder, two, [request])
    torchrun(folder)
    moments, alone = load_file(folder / "moments.safetensors"), moments_of(worker)
    assert moments.keys() == alone.keys()
    assert cosine(first_gradient(moments), first_gradient(alone)) > 0.9999
    assert load_file(folder / "published.safetensors").keys() == state_of(worker).keys()
