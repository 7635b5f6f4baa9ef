"""Two ranks of torchrun over Gloo against one: the same update, shared failures, full weights by broadcast."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.processes import Launch, Replica, Trainer
from tests.services.trainer.ranked import blobs_of, moments_of, prepare
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.test_service import refused, velocity
from tests.services.trainer.workers import engine_of, make_worker, state_of
from tests.tiny_models import make_tiny

SMOOTH = {"lr": 1e-2, "eps": 1e-3}
"""Larger eps: with a tiny one, AdamW's first steps have the size lr whatever the gradient, and rounding would decide
their sign."""


def both_worlds(model: Path, **trainer: Any) -> tuple[JobSpec, JobSpec]:
    """The same job for one rank and for two."""
    one, two = (
        make_spec(
            model,
            trainer={"optimizer": SMOOTH, "world_size": size, **trainer},
            timeouts={"publish_s": 30.0},
        )
        for size in (1, 2)
    )
    return one, two


def train_both(
    one: Worker, two: Trainer, drawer: Drawer, blobs: SyncBlobs, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the last step, by one rank and by two."""
    for step in range(steps):
        request = drawer.draw(blobs, step)
        alone, together = one.train(request), two.train(request)
        if step == 0 and one.job is not None and one.job.spec.trainer.deterministic:
            assert together.metrics["rollout_corr/exact"] == alone.metrics["rollout_corr/exact"] == 1.0
    return dict(alone.metrics), dict(together.metrics)


def assert_same(alone: dict[str, float], together: dict[str, float]) -> None:
    assert alone.keys() == together.keys()
    for name in ("actor/grad_norm", "actor/kl_loss", "rollout_corr/ratio_min", "rollout_corr/ratio_max"):
        assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-7), name
    assert alone["actor/grad_norm"] > 0


def test_two_ranks_make_the_update_of_one_with_lora(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    """Rank 3 does not divide by two, and one of three micro-batches needs padding."""
    part = {"deterministic": False, "micro_batch_size": 1, "updates_per_step": 2}
    one_spec, two_spec = both_worlds(tiny_qwen_image, **part)
    two: Trainer = launch(Trainer, two_spec, tmp_path)
    one = make_worker(one_spec, ranks, blobs, tmp_path / "one")
    drawer = Drawer(one_spec)
    assert two.configure().world_size == 2

    broken = drawer.draw(blobs, 0)
    for item in broken.samples:  # whichever rank reads it
        item.sample.trajectory.uri += "-gone"
    refused(grpc.StatusCode.NOT_FOUND, two.train, broken)

    assert_same(*train_both(one, two, drawer, blobs, steps=2))
    saved = Path(two.save().path)
    assert {file.suffix for file in saved.iterdir() if file.is_file()} == {".safetensors", ".json"}
    exported = load_file(two.export(tmp_path / "model") / "pytorch_lora_weights.safetensors")
    assert one.job is not None
    for name, tensor in one.job.engine.full_tensors():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-6)

    two.kill()
    reread = Worker(ranks, blobs)  # what two ranks saved, one rank resumes
    configure = trainer_pb2.ConfigureRequest(
        job_id=JOB, spec_json=one_spec.model_dump_json(), directory=str(tmp_path / "checkpoints")
    )
    assert reread.configure(configure).applied_steps == 2
    assert reread.job is not None
    for name, tensor in reread.job.engine.full_tensors():
        assert torch.equal(exported[name], tensor)


@pytest.mark.long
def test_two_ranks_make_the_update_of_one_with_full_weights_and_broadcast_them(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    one_spec, two_spec = both_worlds(tiny_qwen_image, mode="full")
    two: Trainer = launch(Trainer, two_spec, tmp_path)
    names = (("a", "none"), ("b", "none"), ("dies", "die"), ("hangs", "hang"))
    a, b, dies, hangs = (launch(Replica, tmp_path, name=name, fault=fault) for name, fault in names)
    one = make_worker(one_spec, ranks, blobs, tmp_path / "one")
    drawer = Drawer(one_spec)
    two.configure()
    assert_same(*train_both(one, two, drawer, blobs, steps=2))

    published = two.publish(2, a, b)
    check(published, a, b)
    assert 0 < published.update_seconds < published.seconds
    for faulty in (dies, hangs):
        two.train(drawer.draw(blobs, two.status().applied_steps))
        version = two.status().applied_steps
        faulty.address()
        start = time.monotonic()
        response = two.publish(version, a, b, faulty)
        assert time.monotonic() - start < 25
        failed = {result.replica_id for result in response.results if not result.ok}
        assert failed == {faulty.name}
        check(response, a, b)
    joined = a.status().samples_total
    two.train(drawer.draw(blobs, 4))
    check(two.publish(5, b, a), a, b)
    assert a.status().samples_total == joined  # the group of a and b was kept

    exported = two.export(tmp_path / "model")
    pipeline = QwenImagePipeline.from_pretrained(exported)
    for step in (2, 3, 4):
        one.train(drawer.draw(blobs, step))
    assert one.job is not None
    own = dict(one.job.engine.full_tensors())
    for name, parameter in pipeline.transformer.named_parameters():
        torch.testing.assert_close(parameter.data, own[f"transformer.{name}"], rtol=1e-4, atol=1e-5)
    base = velocity(drawer.adapter.pipeline, drawer, one_spec)
    assert not torch.allclose(velocity(pipeline, drawer, one_spec), base, atol=1e-4)
    assert two.end() in (0, 1)  # torchrun reports the signal that it got


def check(response: trainer_pb2.PublishWeightsResponse, *replicas: Replica) -> None:
    for replica in replicas:
        status = replica.status()
        assert (status.policy_version, status.weights_digest) == (response.version, response.weights_digest)


STATES = ("device", "host", "8bit")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], JobSpec]:
    """Jobs that train all weights of a model with parameters of 85 rows and of one, by state of the optimizer and
    number of ranks."""
    model = make_tiny("z_image", tmp_path_factory.mktemp("odd") / "model")

    def make(state: str, world_size: int) -> JobSpec:
        optimizer = {"state": state, "lr": 1e-3}
        return make_spec(model, trainer={"mode": "full", "world_size": world_size, "optimizer": optimizer})

    return make


@pytest.fixture(scope="module")
def exchanged(
    odd: Callable[[str, int], JobSpec], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Worker]]:
    """Folders of jobs in `<state>-by-two`, trained and saved by two ranks, and in `<state>-by-one`, by one; those two
    ranks have resumed. And the workers that were the one."""
    folder = tmp_path_factory.mktemp("exchanged")
    alone = {}
    for state in STATES:
        by_one, by_two = folder / f"{state}-by-one", folder / f"{state}-by-two"
        drawer = Drawer(odd(state, 1))
        prepare(by_two, odd(state, 2), [drawer.draw(blobs_of(by_two), step) for step in range(2)])
        prepare(by_one, odd(state, 2), [])
        alone[state] = make_worker(odd(state, 1), ranks, blobs_of(by_one), by_one)
        alone[state].train(drawer.draw(blobs_of(by_one), 0))
        alone[state].save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    torchrun(*sorted(folder.iterdir()))
    return folder, alone


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
def test_another_number_of_ranks_resumes_a_checkpoint_bit_for_bit(
    state: str, odd: Callable[[str, int], JobSpec], exchanged: tuple[Path, dict[str, Worker]], ranks: Ranks
) -> None:
    """Two ranks hold 43 and 42 rows of 85, and one and none of one."""
    folder, alone = exchanged
    by_one, by_two = folder / f"{state}-by-one", folder / f"{state}-by-two"
    fewer = make_worker(odd(state, 1), ranks, blobs_of(by_two), by_two)
    assert fewer.job is not None
    assert fewer.job.record.version == 2
    assert set(engine_of(fewer).optimizer.num_steps().values()) == {2}
    for worker, other in ((fewer, by_two), (alone[state], by_one)):
        weights, moments = (load_file(other / f"{name}.safetensors") for name in ("published", "moments"))
        assert_equal(state_of(worker), weights)
        assert_equal(moments_of(worker), moments)
        assert all(tensor.count_nonzero() for name, tensor in moments.items() if not name.startswith("exp_avg_sq_c"))
        assert any(name.startswith("exp_avg_codes.") for name in moments) is (state == "8bit")
    assert {85, 1} <= {len(tensor) for tensor in moments.values()}
    request = Drawer(odd(state, 1)).draw(blobs_of(by_two), 2)
    assert fewer.train(request).metrics["actor/grad_norm"] > 0


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
