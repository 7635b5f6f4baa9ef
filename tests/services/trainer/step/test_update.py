"""The update inside one process: where old log-probs come from, KL, skipped updates, refusals, checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.trajectories import Trajectory
from flowfleet.errors import Conflict, DataLoss, InvalidRequest, NotFound
from flowfleet.proto import trainer_pb2
from flowfleet.weights import weights
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import make_worker, state_of


@pytest.mark.parametrize(
    "rollout",
    [
        {"noise": {"type": "cps", "eta": 0.6}},
        {"guidance_scale": 3.0},
        {"noise": {"eta": 1.2}, "window": {"size": 3, "allow_coarse": True}},
        {"shift": 4.0, "window": {"strategy": "listed", "steps": [0, 2]}},
        {"shift": 4.0, "window": {"strategy": "fraction", "fraction": 0.7}},
    ],
    ids=["cps", "guided", "wide", "listed", "fraction"],
)
def test_log_probs_are_the_rollouts_bit_for_bit(
    rollout: dict[str, Any], tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, rollout=rollout, trainer={"gradient_checkpointing": "full"})
    worker = make_worker(spec, ranks, files, tmp_path)
    metrics = worker.train(Drawer(spec).draw(files, 0)).metrics
    assert metrics["rollout_corr/exact"] == 1.0
    assert metrics["actor/grad_norm"] > 0


def test_a_job_that_cannot_be_trained_is_refused(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    no_target = {"lora": {"target_modules": ["to_x"]}}
    no_limit = {"name": "flow_grpo", "clip_nats": 1e3}
    coarse = {"window": {"strategy": "all", "size": 2}}
    bad_jobs = [
        (make_spec(tmp_path / "nowhere").model_dump_json(), "is not a folder"),
        (
            make_spec(tiny_qwen_image, trainer=no_target).model_dump_json(),
            "no module 'to_x'",
        ),
        (make_spec(tiny_qwen_image, algorithm=no_limit).model_dump_json(), "lower clip_nats"),
        (make_spec(tiny_qwen_image, rollout=coarse).model_dump_json(), "step 2 of 4 is too coarse"),
        (make_spec(tiny_qwen_image, rollout={"num_frames": 5}).model_dump_json(), "leave num_frames at 1"),
        (spec.model_dump_json().replace('"seed"', '"sed"'), "did you mean seed"),
        ("{", "Expecting"),
    ]
    worker = Worker(ranks, files)
    for text, match in bad_jobs:
        with pytest.raises(InvalidRequest, match=match):
            worker.configure(trainer_pb2.ConfigureRequest(job_id=JOB, spec_json=text, directory=str(tmp_path)))
    make_worker(spec, ranks, files, tmp_path)
    assert worker.job is None


def test_checkpoints_keep_the_last_and_skip_the_broken(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, schedule={"keep_last": 2})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    request = trainer_pb2.SaveCheckpointRequest(job_id=JOB)
    for step in range(3):
        worker.train(drawer.draw(files, step))
        path = Path(worker.save(request).path)
        assert worker.save(request).path == str(path)
    directory = path.parent
    assert sorted(file.name for file in directory.glob("*step-*")) == ["step-00000002", "step-00000003"]
    next(path.glob("*.safetensors")).write_bytes(b"torn")
    (directory / ".step-00000004.partial").mkdir()
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert resumed.job is not None
    assert resumed.job.record.version == 2
    resumed.train(drawer.draw(files, 2))
    assert state_of(resumed).keys() == state_of(worker).keys()
    assert weights.tensor_hashes(state_of(resumed).items()) == weights.tensor_hashes(state_of(worker).items())
    other = make_spec(tiny_qwen_image, trainer={"lora": {"rank": 4}})
    with pytest.raises(Conflict, match="use an empty directory"):
        make_worker(other, ranks, files, tmp_path)


def test_recomputed_old_log_probs_are_those_of_the_first_forward(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    states = []
    for mode in ("first_forward", "recompute"):
        spec = make_spec(tiny_qwen_image, algorithm={"old_log_probs": mode}, trainer={"updates_per_step": 2})
        worker = make_worker(spec, ranks, files, tmp_path / mode)
        metrics = worker.train(Drawer(spec).draw(files, 0)).metrics
        assert metrics["rollout_corr/exact"] == 1.0
        states.append((state_of(worker), metrics["actor/ratio_std"], metrics["actor/loss"]))
    assert states[0][1] > 0
    assert states[0][1:] == states[1][1:]
    assert all(torch.equal(states[0][0][name], states[1][0][name]) for name in states[0][0])


def test_the_reference_is_the_model_without_its_adapter(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, algorithm={"kl_coef": 0.1})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    first = worker.train(drawer.draw(files, 0)).metrics
    second = worker.train(drawer.draw(files, 1)).metrics
    assert first["actor/kl_loss"] == 0.0  # B starts at zero
    assert second["actor/kl_loss"] > 0.0
    assert "timing_s/ref" in second


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    worker.train(drawer.draw(files, 0))
    before = state_of(worker)
    request = drawer.draw(files, 1)
    sample = request.samples[3].sample
    trajectory = Trajectory.from_bytes(files.get(sample.trajectory))
    trajectory.next_latents[-1, 0, 0] = math.nan
    sample.trajectory.CopyFrom(files.put("ff:nan", trajectory.to_bytes()))
    response = worker.train(request)
    assert response.policy_version == 2
    assert response.metrics["actor/skipped_updates"] == 1.0
    assert all(math.isfinite(value) for value in response.metrics.values())
    assert weights.tensor_hashes(before.items()) == weights.tensor_hashes(state_of(worker).items())
    healthy = worker.train(drawer.draw(files, 2)).metrics
    assert healthy["actor/skipped_updates"] == 0.0
    assert healthy["actor/skipped_updates_total"] == 1.0
    assert healthy["actor/grad_norm"] > 0


@pytest.mark.parametrize("by", [math.nan, math.inf])
def test_a_gap_that_is_not_finite_is_counted_and_left_out_of_the_mean(
    by: float, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """First one row (sample 4, its second noisy step) of twelve, then all rows."""
    spec = make_spec(tiny_qwen_image)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    one, every = drawer.draw(files, 0), drawer.draw(files, 1)
    shifted(one, files, 4, by=torch.tensor([0.0, by]))
    for row in range(len(every.samples)):
        shifted(every, files, row, by=torch.tensor(by))

    metrics = worker.train(one).metrics
    assert metrics["rollout_corr/not_finite"] == pytest.approx(1 / 12)
    assert metrics["rollout_corr/exact"] == 1.0
    assert metrics["rollout_corr/log_ratio_abs_mean"] == metrics["rollout_corr/log_ratio_abs_max"] == 0.0
    metrics = worker.train(every).metrics
    assert metrics["rollout_corr/not_finite"] == 1.0
    assert "rollout_corr/log_ratio_abs_mean" not in metrics


def test_what_cannot_be_trained_on_is_named_and_harms_nothing(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    before = state_of(worker)

    def refused(change: Any, error: type[Exception], match: str) -> None:
        request = drawer.draw(files, 0)
        change(request.samples[2])
        with pytest.raises(error, match=match):
            worker.train(request)

    def expire(item: trainer_pb2.TrainSample) -> None:
        files.delete([item.sample.trajectory])

    def corrupt(item: trainer_pb2.TrainSample) -> None:
        item.sample.trajectory.sha256 = "0" * 64

    refused(expire, NotFound, r"sample job-1/0/1/0: .*gone")
    refused(corrupt, DataLoss, r"sample job-1/0/1/0: .*SHA-256")
    refused(lambda item: setattr(item, "advantage", math.nan), InvalidRequest, r"0/1/0: its advantage is nan")
    refused(lambda item: item.sample.ClearField("trajectory"), InvalidRequest, "carries no trajectory")
    refused(lambda item: setattr(item.sample, "height", 64), InvalidRequest, "pixels")
    refused(lambda item: setattr(item.sample.id, "job_id", "other"), InvalidRequest, "another job")
    refused(lambda item: item.sample.sde_steps.append(3), InvalidRequest, "all must share them")
    refused(lambda item: setattr(item.sample.id, "index", 1), InvalidRequest, "twice")
    assert weights.tensor_hashes(before.items()) == weights.tensor_hashes(state_of(worker).items())
    assert worker.train(drawer.draw(files, 0)).metrics["rollout_corr/exact"] == 1.0


def shifted(request: trainer_pb2.TrainStepRequest, files: SyncBlobs, row: int, by: float | torch.Tensor) -> None:
    """Lets one sample's rollout have found it less likely, by `by` nats an element, one for all noisy steps or each."""
    sample = request.samples[row].sample
    trajectory = Trajectory.from_bytes(files.get(sample.trajectory))
    trajectory.log_probs.sub_(by)
    sample.trajectory.CopyFrom(files.put(f"ff:shifted-{request.step}-{row}", trajectory.to_bytes()))


@pytest.mark.parametrize("mode", ["first_forward", "recompute", "rollout"])
def test_a_rejected_sample_teaches_nothing_but_counts(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """It counts like a sample without an advantage; one of six samples lies outside."""
    part = {"old_log_probs": mode, "correction": {"mode": "rejection", "low": 0.5, "high": 2.0}}
    spec = make_spec(tiny_qwen_image, algorithm=part)
    drawer = Drawer(spec)
    rejected, idle = drawer.draw(files, 0), drawer.draw(files, 0)
    shifted(rejected, files, 4, by=1.0)
    idle.samples[4].advantage = 0.0
    states = []
    for number, request in enumerate((rejected, idle)):
        worker = make_worker(spec, ranks, files, tmp_path / str(number))
        metrics = worker.train(request).metrics
        outside = 1 / 6 if request is rejected else 0.0
        assert metrics["rollout_corr/outside"] == pytest.approx(outside)
        assert metrics["rollout_corr/weight_mean"] == pytest.approx(1 - outside)
        states.append(state_of(worker))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("mode", "expected"), [("first_forward", 2.0), ("rollout", 2.0 / math.e)])
def test_truncated_weights_are_charted(
    mode: str, expected: float, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The trainer finds one of six samples e times as likely as the rollout did; at most 2 counts."""
    part = {"old_log_probs": mode, "correction": {"mode": "truncated", "high": 2.0}}
    spec = make_spec(tiny_qwen_image, algorithm=part)
    request = Drawer(spec).draw(files, 0)
    shifted(request, files, 0, by=1.0)
    metrics = make_worker(spec, ranks, files, tmp_path).train(request).metrics
    assert metrics["rollout_corr/outside"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/weight_mean"] == pytest.approx((5 + expected) / 6, rel=1e-5)
    assert metrics["rollout_corr/ratio_max"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["rollout_corr/beyond_clip"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/log_ratio_abs_p99"] <= metrics["rollout_corr/log_ratio_abs_max"]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_samples_weight_is_that_of_all_its_steps(
    passes: int, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """One of six samples was e times as likely at one of its two noisy steps, another 3 times at both, too much."""
    part = {"mode": "band", "high": 2.0, "level": "sequence"}
    spec = make_spec(tiny_qwen_image, algorithm={"correction": part, "clip_range": 0.5}, trainer={"passes": passes})
    request = Drawer(spec).draw(files, 0)
    shifted(request, files, 0, by=torch.tensor([1.0, 0.0]))
    shifted(request, files, 3, by=math.log(3))
    metrics = make_worker(spec, ranks, files, tmp_path).train(request).metrics
    assert metrics["rollout_corr/weight_mean"] == pytest.approx((4 + math.exp(0.5)) / 6, rel=1e-6)
    assert metrics["rollout_corr/outside"] == pytest.approx(1 / 6)
    weights = torch.tensor([math.exp(0.5), 1.0, 1.0, 0.0, 1.0, 1.0])
    if passes == 1:  # the ratio of the only update is 1
        advantages = torch.tensor([item.advantage for item in request.samples])
        assert metrics["actor/loss"] == pytest.approx(float(-(weights * advantages).mean()), rel=1e-5)
