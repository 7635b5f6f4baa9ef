"""The trainer on sequences: against a loop written from the formulas, packed or one by one, replayed, checkpointed."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowfleet.algorithms.settings import AggregationSettings
from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.errors import DataLoss, InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.proto.trainer_pb2 import TrainStepRequest
from flowfleet.redis import keys
from flowfleet.weights import lora
from services.trainer.model.engine import lora_spec
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.sequences import Writer, make_spec
from tests.services.trainer.steps import JOB
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import make_worker, state_of, trained_of
from tests.tiny_models.text import save_text_model


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("plain"))


class Oracle:
    """A loop from the formulas: one sequence a forward, logits of transformers, AdamW of torch."""

    def __init__(self, spec: JobSpec, start: dict[str, Tensor]) -> None:
        self.spec = spec
        self.model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
        experts = {"model": self.model}
        if spec.trainer.mode == "lora":
            self.trained = lora.install_lora(experts, lora_spec(spec))
            lora.load_adapter(experts, start)
        else:
            self.trained = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        part = spec.trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            list(self.trained.values()), part.lr, betas=part.betas, eps=part.eps, weight_decay=part.weight_decay
        )

    def log_probs(self, prompt: Tensor, written: TokenTrajectory) -> Tensor:
        ids = torch.cat([prompt, written.token_ids])
        logits = self.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logits = logits / self.spec.rollout.sequence.temperature
        return logits.log_softmax(-1).gather(-1, written.token_ids[:, None])[:, 0][written.mask]

    def train(self, request: TrainStepRequest, blobs: SyncBlobs) -> None:
        """One update, in which the old policy is the current one."""
        part: Any = self.spec.algorithm
        losses, lengths = [], []
        for item in request.samples:
            prompt = PromptBlob.from_bytes(blobs.get(item.sample.prompt_embeds)).token_ids
            written = TokenTrajectory.from_bytes(blobs.get(item.sample.trajectory))
            log_prob = self.log_probs(prompt, written)
            ratio = (log_prob - log_prob.detach()).exp()
            if part.loss == "gspo":
                ratio = (log_prob - log_prob.detach()).mean().exp()[None]
            surrogate = torch.maximum(
                -item.advantage * ratio,
                -item.advantage * ratio.clamp(1 - (part.clip_range_low or part.clip_range), 1 + part.clip_range),
            )
            kl = torch.zeros(())
            if part.kl_coef:
                with torch.no_grad(), lora.adapter_disabled({"model": self.model}):
                    reference = self.log_probs(prompt, written)
                kl = (reference - log_prob).exp() - (reference - log_prob) - 1
            losses.append(surrogate + part.kl_coef * kl)
            lengths.append(len(log_prob))
        if self.spec.algorithm.of(AggregationSettings).aggregation == "token":
            loss = torch.cat(losses).mean()
        else:
            loss = torch.stack([own.mean() for own in losses]).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.spec.trainer.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), atol=atol, rtol=0)


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "dapo": {"algorithm": {"name": "dapo"}},
    "gspo": {"algorithm": {"name": "gspo"}},
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_two_steps_are_those_of_a_plain_loop(
    name: str, mode: str, folder: Path, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    spec = make_spec(folder, name)
    kl = 0.0 if mode == "full" else 0.3  # the plain loop has no copy of the base
    data = spec.model_dump(mode="json")
    data["trainer"]["mode"] = mode
    data["algorithm"]["kl_coef"] = kl if name == "grpo" else 0.0
    data["rollout"]["sequence"]["routed_experts"] = False  # the plain loop's model chooses its experts
    spec = JobSpec.model_validate(data)
    writer = Writer(spec)
    requests = [writer.write(files, step, masked=name != "gspo") for step in range(2)]
    worker = make_worker(spec, ranks, files, tmp_path)
    oracle = Oracle(spec, trained_of(worker))
    for request in requests:
        metrics = dict(worker.train(request).metrics)
        oracle.train(request, files)
    assert_close(trained_of(worker), dict(oracle.trained), atol=2e-5)
    assert metrics["actor/ratio_min"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["training/step_samples"] == 6


@pytest.mark.parametrize("name", ["gspo", "dapo"])
def test_packed_or_one_by_one_gives_the_same_update(
    name: str, dense: Path, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    """One by one, as the rollout computed them, log-probs are the rollout's bit for bit."""
    specs = [
        make_spec(
            dense,
            name,
            trainer={"updates_per_step": 2, "threads": 1, "lora": {"rank": 3, "alpha": 6.0}, **changes},
        )
        for changes in ({"micro_batch_tokens": 200}, {"deterministic": True})
    ]
    request = Writer(specs[0]).write(files, 0)
    states, metrics = [], []
    for number, spec in enumerate(specs):
        worker = make_worker(spec, ranks, files, tmp_path / str(number))
        metrics.append(dict(worker.train(request).metrics))
        states.append(trained_of(worker))
    assert_close(states[0], states[1], atol=1e-5)
    assert metrics[1]["rollout_corr/exact"] == 1.0
    assert metrics[0]["rollout_corr/log_ratio_abs_max"] < 1e-5
    assert metrics[0]["actor/loss"] == pytest.approx(metrics[1]["actor/loss"], abs=1e-5)


CORRECTED: dict[str, dict[str, Any]] = {
    "truncated tokens": {"mode": "truncated", "high": 1.5},
    "truncated sequences": {"mode": "truncated", "level": "sequence", "high": 1.2},
    "rejected sequences": {"mode": "rejection", "level": "sequence", "low": 0.8, "high": 1.2},
}


@pytest.mark.parametrize("case", sorted(CORRECTED))
def test_corrections_weigh_tokens_or_sequences(
    case: str, dense: Path, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    """The first sequence's log-probs are the rollout's less 0.3 a token: its ratio is e^0.3."""
    part = CORRECTED[case]
    spec = make_spec(dense, algorithm={"name": "grpo", "kl_coef": 0.0, "correction": part})
    request = Writer(spec).write(files, 0)
    sample = request.samples[0].sample
    written = TokenTrajectory.from_bytes(files.get(sample.trajectory))
    moved = replace(written, log_probs=written.log_probs - 0.3)
    sample.trajectory.CopyFrom(files.put(keys.blob(JOB, "moved"), moved.to_bytes()))
    ratio = math.exp(0.3)
    weight = min(ratio, part["high"])
    outside = float(ratio > part["high"])
    if part["mode"] == "rejection":
        weight, outside = 0.0, 1.0
    metrics = dict(make_worker(spec, ranks, files, tmp_path).train(request).metrics)
    assert metrics["rollout_corr/weight_mean"] == pytest.approx((5 + weight) / 6, rel=1e-5)
    assert metrics["rollout_corr/outside"] == pytest.approx(outside / 6)
    assert metrics["rollout_corr/log_ratio_abs_max"] == pytest.approx(0.3, abs=1e-5)


def test_experts_are_replayed_unless_the_job_says_no(files: SyncBlobs, ranks: Ranks, tmp_path: Path) -> None:
    """Log-probs under other experts are other log-probs; a trajectory that lacks them is refused."""
    folder = save_text_model(tmp_path / "model", "experts")
    rollout = {"prompts_per_step": 1, "group_size": 2, "sequence": {"max_tokens": 8}}
    spec = make_spec(folder, "gspo", rollout=rollout)
    worker = make_worker(spec, ranks, files, tmp_path)
    request = Writer(spec).write(files, 0)
    other = TrainStepRequest.FromString(request.SerializeToString())
    for item in other.samples:
        written = TokenTrajectory.from_bytes(files.get(item.sample.trajectory))
        assert written.routed_experts is not None
        moved = replace(written, routed_experts=(written.routed_experts + 3) % 8)
        item.sample.trajectory.CopyFrom(files.put(keys.blob(JOB, f"m{item.sample.id.index}"), moved.to_bytes()))
    less = replace(written, routed_experts=None)
    bare = TrainStepRequest.FromString(request.SerializeToString())
    bare.samples[1].sample.trajectory.CopyFrom(files.put(keys.blob(JOB, "bare"), less.to_bytes()))
    with pytest.raises(InvalidRequest, match=r"job-1/0/0/1: it has no routed_experts: set rollout\.sequence"):
        worker.train(bare)
    metrics = dict(worker.train(request).metrics)
    assert metrics["rollout_corr/log_ratio_abs_max"] < 1e-5
    moved_metrics = dict(make_worker(spec, ranks, files, tmp_path / "other").train(other).metrics)
    assert moved_metrics["rollout_corr/log_ratio_abs_max"] > 1e-3


def test_an_update_from_the_rollouts_weights_is_the_same_without_replay(
    files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    """Bit for bit: the router chooses the same experts again. In later updates its weights are others."""
    folder = save_text_model(tmp_path / "model", "experts")
    rollouts = [
        {"prompts_per_step": 3, "group_size": 2, "sequence": {"max_tokens": 8, "routed_experts": is_on}}
        for is_on in (True, False)
    ]
    specs = [make_spec(folder, "gspo", rollout=rollout) for rollout in rollouts]
    workers = [make_worker(spec, ranks, files, tmp_path / str(number)) for number, spec in enumerate(specs)]
    request, before = Writer(specs[0]).write(files, 0), trained_of(workers[0])
    with pytest.raises(InvalidRequest, match=r"sample job-1/0/0/0: it has routed_experts, and .* is off"):
        workers[1].train(request)
    workers[0].train(request)
    workers[1].train(Writer(specs[1]).write(files, 0))
    expected = trained_of(workers[0])
    assert any(not torch.equal(tensor, before[name]) for name, tensor in expected.items())
    for name, tensor in trained_of(workers[1]).items():
        assert torch.equal(tensor, expected[name]), name


def test_experts_of_a_model_that_has_none_are_refused(
    dense: Path, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    """A dense model's own samples have none, and are trained on with the default."""
    spec = make_spec(dense)
    worker, request = make_worker(spec, ranks, files, tmp_path), Writer(spec).write(files, 0)
    sample = request.samples[0].sample
    written = TokenTrajectory.from_bytes(files.get(sample.trajectory))
    assert (spec.rollout.sequence.routed_experts, written.routed_experts) == (True, None)
    worker.train(request)
    shape = (sample.prompt_tokens + sample.num_tokens - 1, 2, 2)
    odd = replace(written, routed_experts=torch.zeros(shape, dtype=torch.uint8))
    sample.trajectory.CopyFrom(files.put(keys.blob(JOB, "odd"), odd.to_bytes()))
    with pytest.raises(InvalidRequest, match=r"sample job-1/0/0/0: the trajectory has routed_experts, and this model"):
        make_worker(spec, ranks, files, tmp_path / "again").train(request)


def test_a_broken_sequence_is_named_before_anything_changes(
    dense: Path, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    spec = make_spec(dense)
    worker = make_worker(spec, ranks, files, tmp_path)
    before = trained_of(worker)
    request = Writer(spec).write(files, 0)
    good = request.samples[3].sample
    written = TokenTrajectory.from_bytes(files.get(good.trajectory))
    kept = good.trajectory.SerializeToString()
    odd = replace(written, token_ids=written.token_ids + 48)
    good.trajectory.CopyFrom(files.put(keys.blob(JOB, "odd"), odd.to_bytes()))
    with pytest.raises(InvalidRequest, match=r"sample job-1/0/1/1: its sequence has token \d+, and the model has 42"):
        worker.train(request)
    good.trajectory.CopyFrom(request.samples[3].sample.prompt_embeds)
    with pytest.raises(DataLoss, match=r"sample job-1/0/1/1: expected a blob of format flowfleet\.tokens\.v1"):
        worker.train(request)
    good.trajectory.ParseFromString(kept)
    good.num_tokens += 1
    with pytest.raises(InvalidRequest, match=r"sample job-1/0/1/1: its sequence has \d tokens, the sample says \d"):
        worker.train(request)
    for name, tensor in trained_of(worker).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_two_ranks_make_the_steps_of_one(mode: str, files: SyncBlobs, ranks: Ranks, tmp_path: Path) -> None:
    """FSDP2 by Gloo, experts sharded too: weights and metrics of one rank, over two passes."""
    folder = save_text_model(tmp_path / "model", "experts")
    trainer = {"mode": mode, "passes": 2, "sharding": "fsdp", "threads": 1, "optimizer": {"lr": 1e-2, "eps": 1e-3}}
    trainer |= {"lora": {"rank": 3, "alpha": 6.0}, "micro_batch_tokens": 20, "updates_per_step": 1}
    one, two = (make_spec(folder, "dapo", trainer={**trainer, "world_size": size}) for size in (1, 2))
    blobs = blobs_of(tmp_path / "job")
    writer = Writer(one)
    requests = [writer.write(blobs, step) for step in range(2)]
    worker = make_worker(one, ranks, blobs, tmp_path / "one")
    alone = [dict(worker.train(request).metrics) for request in requests]
    prepare(tmp_path / "job", two, requests)
    torchrun(tmp_path / "job")
    together = json.loads((tmp_path / "job" / "metrics.json").read_text())
    for mine, theirs in zip(alone, together, strict=True):
        assert mine.keys() == theirs.keys()
        for metric in mine:
            if not metric.startswith(("timing", "perf", "rollout_corr/exact")):  # ranks pack otherwise: other bits
                assert theirs[metric] == pytest.approx(mine[metric], rel=1e-3, abs=1e-5), metric
    published = load_file(tmp_path / "job" / "published.safetensors")
    for parameter, tensor in state_of(worker).items():
        torch.testing.assert_close(published[parameter], tensor, rtol=1e-3, atol=3e-5)
