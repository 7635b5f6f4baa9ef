"""Reference, old policy and average: switched without a trace, followed, published, saved."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import ModelAdapter
from flowfleet.proto import trainer_pb2
from flowfleet.weights.weights import copy_into, full_parameters
from services.trainer.checkpoints.fence import Fence
from services.trainer.checkpoints.state import read_state, write_state
from services.trainer.export import About, export
from services.trainer.model.engine import lora_spec
from services.trainer.model.policies import Policy
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, state_of, trained_of

POLICIES: tuple[Policy, ...] = ("reference", "old")
MODES = pytest.mark.parametrize("mode", ["lora", "full"])


def nft_spec(model: Path, mode: str, **algorithm: Any) -> JobSpec:
    part = {"name": "diffusion_nft", "num_noise_levels": 2, "kl_coef": 0.1} | algorithm
    return make_spec(model, algorithm=part, trainer={"mode": mode, "optimizer": {"lr": 1e-2, "eps": 1e-3}})


def load(replica: Drawer, spec: JobSpec, state: dict[str, Tensor]) -> None:
    """Gives a replica published weights."""
    if spec.trainer.mode == "lora":
        replica.load(state, lora_spec(spec))
    else:
        into = copy_into(full_parameters(replica.adapter.experts))
        for name, tensor in state.items():
            into(name, tensor)


def velocity(adapter: ModelAdapter, spec: JobSpec, drawer: Drawer) -> Tensor:
    """Velocity of the current model."""
    latents = torch.ones(1, *adapter.latent_shape(spec.rollout.size))
    with torch.no_grad():
        return adapter.velocity(latents, torch.tensor(500.0), drawer.adapter.encode(["a sign"]), size=spec.rollout.size)


def curve(worker: Worker, drawer: Drawer, files: SyncBlobs, steps: range) -> list[dict[str, float]]:
    """Metrics without times and speeds."""
    answers = [worker.train(drawer.draw(files, step)).metrics for step in steps]
    return [{name: m[name] for name in m if not name.startswith(("timing", "perf"))} for m in answers]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@MODES
def test_policies_are_switched_without_a_trace(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The old policy is that of a replica which got the published weights, the reference that of one without any."""
    spec = nft_spec(tiny_qwen_image, mode, old_policy={"rate": 0.9, "max": 0.9})
    worker, drawer, replica = make_worker(spec, ranks, files, tmp_path), Drawer(spec), Drawer(spec)
    curve(worker, drawer, files, range(3))
    load(replica, spec, state_of(worker))
    engine, trained = engine_of(worker), trained_of(worker)
    own = velocity(engine.adapter, spec, drawer)
    expected: dict[Policy, torch.Tensor] = {
        "reference": velocity(drawer.adapter, spec, drawer),
        "old": velocity(replica.adapter, spec, drawer),
    }
    for policy in POLICIES:
        with engine.policy(policy):
            seen = velocity(engine.adapter, spec, drawer)
        torch.testing.assert_close(seen, expected[policy], rtol=0, atol=1e-5)
        assert not torch.allclose(seen, own, rtol=0, atol=1e-3)
        with contextlib.suppress(ArithmeticError), engine.policy(policy):
            velocity(engine.adapter, spec, drawer)
            raise ArithmeticError
        assert same(trained_of(worker), trained)
        assert torch.equal(velocity(engine.adapter, spec, drawer), own)


@MODES
def test_the_old_policy_follows_and_is_what_is_published(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Two updates a step: after step i it keeps min(0.6, 0.2 (2 (i + 1) - 3)) of itself, as the authors count."""
    part = {"rate": 0.2, "max": 0.6, "delay": 3}
    spec = nft_spec(tiny_qwen_image, mode, old_policy=part)
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"updates_per_step": 2})})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    old = {name: tensor.double() for name, tensor in trained_of(worker).items()}
    for step, decay in enumerate((0.0, 0.2, 0.6, 0.6)):
        (metrics,) = curve(worker, drawer, files, range(step, step + 1))
        assert metrics["training/old_policy_decay"] == pytest.approx(decay)
        trained = trained_of(worker)
        old = {name: decay * old[name] + (1 - decay) * trained[name].double() for name in trained}
        published = state_of(worker)
        for name, tensor in old.items():
            torch.testing.assert_close(published[name].double(), tensor, rtol=1e-6, atol=1e-7)
    assert not same(published, trained)


def test_an_old_policy_that_does_not_sample_is_only_compared_with(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = nft_spec(tiny_qwen_image, "lora", loss="crd", old_policy={"rate": 1.0, "max": 0.9})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    curve(worker, drawer, files, range(2))
    trained = trained_of(worker)
    assert same(state_of(worker), trained)
    with engine_of(worker).policy("old"):
        assert not same(trained_of(worker), trained)


@MODES
def test_a_moving_reference_is_the_policy_after_its_turn_and_is_resumed(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Every second step; or where the distance is above the threshold, as it is once the policy has left it."""
    cases: tuple[tuple[dict[str, float], set[int]], ...] = (
        ({"every": 2}, {1}),
        ({"threshold": 1e9}, set()),
        ({"threshold": 1e-9}, {1}),
    )
    for number, (part, turns) in enumerate(cases):
        folder = tmp_path / str(number)
        spec = nft_spec(tiny_qwen_image, mode, kl_coef=0.1, kl_reference=part)
        worker, drawer = make_worker(spec, ranks, files, folder), Drawer(spec)
        reference = trained_of(worker)
        for step in range(3):
            curve(worker, drawer, files, range(step, step + 1))
            reference = trained_of(worker) if step in turns else reference
            with engine_of(worker).policy("reference"):
                assert same(trained_of(worker), reference)
        worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
        resumed = make_worker(spec, ranks, files, folder)
        with engine_of(resumed).policy("reference"):
            assert same(trained_of(resumed), reference)


@MODES
def test_a_resumed_job_goes_on_with_its_old_policy_bit_for_bit(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The average and the count of updates too, and the reference, which a checkpoint does not hold: it is the model on
    disk."""
    spec = nft_spec(tiny_qwen_image, mode, old_policy={"rate": 0.3, "max": 0.9})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    curve(worker, drawer, files, range(3))
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    published = state_of(worker)
    assert not same(published, trained_of(worker))
    average = state_of(worker, evaluated=True)
    assert not same(average, published)
    assert not same(average, trained_of(worker))
    expected = curve(worker, drawer, files, range(3, 5))
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert same(state_of(resumed), published)
    assert same(state_of(resumed, evaluated=True), average)
    assert curve(resumed, drawer, files, range(3, 5)) == expected
    assert same(state_of(resumed), state_of(worker))
    assert same(state_of(resumed, evaluated=True), state_of(worker, evaluated=True))
    assert same(trained_of(resumed), trained_of(worker))
    assert expected[0]["actor/kl_loss"] > 0


@MODES
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_exported_is_the_average_of_the_trained_weights(
    mode: str, every: int, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Held to the average in float64 of the weights after each of two updates a step. The trained ones sample."""
    trainer = {"mode": mode, "updates_per_step": 2, "ema": {"decay": 0.4, "every": every}}
    spec = make_spec(tiny_qwen_image, trainer=trainer)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    average = {name: tensor.double().numpy() for name, tensor in trained_of(worker).items()}
    decays: list[float] = []

    policies = engine_of(worker).policies
    updated = policies.updated

    def follow() -> None:
        updated()
        number = len(decays) + 1
        decays.append(min(0.4, (1 + number) / (10 + number)))
        if (number + 1) % every == 0:
            for name, tensor in trained_of(worker).items():
                average[name] = decays[-1] * average[name] + (1 - decays[-1]) * tensor.double().numpy()

    policies.updated = follow  # type: ignore[method-assign]
    curve(worker, drawer, files, range(3))
    assert decays == [2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 0.4]  # the authors' warm-up
    assert same(state_of(worker), trained_of(worker))
    exported = exported_of(worker, tmp_path / "model")
    assert exported.keys() == average.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor.double().numpy(), average[name], rtol=1e-5, atol=1e-7)
    assert not same(exported, trained_of(worker))


def test_a_checkpoint_from_before_there_were_averages_is_resumed(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The average begins with its trained weights."""
    spec = nft_spec(tiny_qwen_image, "lora")
    before = nft_spec(tiny_qwen_image, "lora").model_dump()
    before["trainer"]["ema"]["decay"] = None
    worker, drawer = make_worker(parse_job(before), ranks, files, tmp_path), Drawer(spec)
    curve(worker, drawer, files, range(2))
    saved = Path(worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB)).path)
    state = read_state(saved)
    del state["updates"]
    write_state(saved, state)
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert same(state_of(resumed, evaluated=True), trained_of(worker))
    assert same(state_of(resumed), state_of(worker))
    assert engine_of(resumed).policies.num_updates == 2


def exported_of(worker: Worker, directory: Path) -> dict[str, Tensor]:
    """What is written of what is trained, by published name."""
    export(engine_of(worker), directory, Fence(directory), About("job", 0))
    if engine_of(worker).is_lora:
        return load_file(directory / "pytorch_lora_weights.safetensors")
    file = directory / "transformer" / "diffusion_pytorch_model.safetensors"
    return {f"transformer.{name}": tensor for name, tensor in load_file(file).items()}


def test_nothing_is_kept_for_losses_that_do_not_ask(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = make_worker(make_spec(tiny_qwen_image, trainer={"mode": "full"}), ranks, files, tmp_path)
    engine = engine_of(worker)
    assert engine.policies.state() == {}
    assert engine.policies.follow() is None
    for policy in POLICIES:
        with pytest.raises(AssertionError), engine.policy(policy):
            pass
    assert same(state_of(worker), trained_of(worker))


def test_a_step_without_pairs_counts_and_changes_nothing(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = make_worker(make_spec(tiny_qwen_image, algorithm={"name": "online_dpo"}), ranks, files, tmp_path)
    before = trained_of(worker)
    response = worker.train(trainer_pb2.TrainStepRequest(job_id=JOB, step=0))
    assert (response.step, response.policy_version, response.replayed) == (0, 1, False)
    assert response.metrics["training/step_samples"] == 0
    after = trained_of(worker)
    assert all(torch.equal(after[name], value) for name, value in before.items())
