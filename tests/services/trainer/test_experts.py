"""Two experts: an update moves those it goes through alone, and checkpoints and exports hold both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.proto import trainer_pb2
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.oracle import Oracle
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, state_of, trained_of
from tests.tiny_models import make_tiny

BOUNDARY = 0.875
MODES = pytest.mark.parametrize("mode", ["lora", "full"])


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("wan_two_experts", tmp_path_factory.mktemp("wan") / "model")


def spec_of(
    wan: Path, mode: str, levels: tuple[float, float] = (0.75, 0.98), num_levels: int = 2, **trainer: Any
) -> JobSpec:
    """Settings of DiffusionNFT, whose noise levels are free."""
    return make_spec(
        wan,
        algorithm={
            "name": "diffusion_nft",
            "num_noise_levels": num_levels,
            "sigma_low": levels[0],
            "sigma_high": levels[1],
            "old_policy": {"rate": 0.5},
        },
        rollout={"num_frames": 5},
        trainer={"mode": mode, "optimizer": {"lr": 1e-2, "eps": 1e-3}, **trainer},
    )


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Components of which a parameter differs."""
    return {name.partition(".")[0] for name in after if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("mode", "sampling"), [("lora", "shifted"), ("full", "uniform"), ("lora", "schedule"), ("full", "schedule")]
)
def test_updates_equal_plain_pytorch(
    mode: str, sampling: str, wan: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Four updates of two rounds, each round on the side that was drawn for it."""
    levels = {} if sampling == "schedule" else {"sigma_low": 0.75, "sigma_high": 0.98}
    algorithm = {"name": "diffusion_nft", "num_noise_levels": 2, "old_policy": {"rate": 0.5}, **levels}
    spec = make_spec(
        wan,
        algorithm=algorithm | {"sigma_sampling": sampling},
        rollout={"num_frames": 5},
        trainer={"mode": mode, "optimizer": {"lr": 1e-2, "eps": 1e-3}, "updates_per_step": 2},
    )
    worker, oracle, drawer = make_worker(spec, ranks, files, tmp_path), Oracle(spec, files), Drawer(spec)
    before = trained_of(worker)
    for step in range(2):
        request = drawer.draw(files, step)
        metrics, losses = worker.train(request).metrics, oracle.train(request)
        assert metrics["actor/loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    assert moved(before, trained_of(worker)) == {"transformer", "transformer_2"}
    for name, tensor in oracle.state().items():
        torch.testing.assert_close(trained_of(worker)[name], tensor, rtol=1e-4, atol=1e-5)


@MODES
@pytest.mark.parametrize(
    ("levels", "component"), [((0.9, 0.98), "transformer"), ((0.1, 0.8), "transformer_2")], ids=["high", "low"]
)
def test_an_expert_that_no_noise_level_reaches_is_left_alone(
    levels: tuple[float, float], component: str, mode: str, wan: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = spec_of(wan, mode, levels)
    worker = make_worker(spec, ranks, files, tmp_path)
    before = trained_of(worker)
    metrics = worker.train(Drawer(spec).draw(files, 0)).metrics
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates"] == 0
    assert moved(before, trained_of(worker)) == {component}
    steps = engine_of(worker).optimizer.num_steps()
    assert steps == {name: int(name == component) for name in ("transformer", "transformer_2")}


@MODES
def test_experts_of_unequal_age_are_resumed_bit_for_bit(
    mode: str, wan: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Three updates of one round cannot be shared evenly."""
    spec = spec_of(wan, mode, num_levels=1, updates_per_step=3)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    worker.train(drawer.draw(files, 0))
    steps = engine_of(worker).optimizer.num_steps()
    assert steps["transformer"] != steps["transformer_2"]
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert engine_of(resumed).optimizer.num_steps() == steps
    for each in (worker, resumed):
        each.train(drawer.draw(files, 1))
    assert not moved(trained_of(worker), trained_of(resumed))
    assert not moved(state_of(worker), state_of(resumed))


@MODES
def test_diffusers_loads_the_export(mode: str, wan: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> None:
    """Compares the velocities of both experts. Without an average it is the old policy that is exported."""
    spec = spec_of(wan, mode, ema={"decay": None})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    for step in range(2):
        worker.train(drawer.draw(files, step))
    folder = Path(export(worker, tmp_path / "model"))
    if mode == "full":
        pipeline = WanPipeline.from_pretrained(folder)
    else:
        pipeline = WanPipeline.from_pretrained(wan)
        pipeline.load_lora_weights(folder)
        second = "pytorch_lora_weights_transformer_2.safetensors"
        pipeline.load_lora_weights(folder, weight_name=second, load_into_transformer_2=True)
    own = drawer.adapter
    loaded = type(own)(pipeline, own.vae_config, dtype=own.dtype, device=own.device)
    for sigma in (0.9, 0.5):
        seen, base = velocity(loaded, own, spec, sigma), velocity(own, own, spec, sigma)
        with engine_of(worker).policy("old"):
            expected = velocity(engine_of(worker).adapter, own, spec, sigma)
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(seen, base, rtol=0, atol=1e-3)


def export(worker: Worker, directory: Path) -> str:
    return worker.export(trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(directory))).path


def velocity(model: ModelAdapter, encoder: ModelAdapter, spec: JobSpec, sigma: float) -> Tensor:
    size, prompts = spec.rollout.size, encoder.encode(["a red ball"])
    with torch.no_grad():
        return model.velocity(torch.ones(1, *model.latent_shape(size)), torch.tensor(1000 * sigma), prompts, size=size)
