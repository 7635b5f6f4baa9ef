"""The trainer on sequences: against a loop written from the formulas, packed or one by one, replayed, checkpointed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.job.spec import JobSpec
from flowfleet.proto.trainer_pb2 import TrainStepRequest
from flowfleet.weights import lora
from services.trainer.model.engine import lora_spec
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.sequences import Writer, make_spec, save_tiny
from tests.services.trainer.workers import make_worker, trained_of


@pytest.fixture(scope="module", params=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain"))


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
        part = self.spec.algorithm
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
        if part.aggregation == "token":
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
    spec = JobSpec.model_validate(data)
    writer = Writer(spec)
    requests = [writer.write(files, step, masked=name != "gspo") for step in range(2)]
    worker = make_worker(spec, ranks, files, tmp_path)
    oracle = Oracle(spec, trained_of(worker))
    for request in requests:
        metrics = dict(worker.train(request).metrics)
        oracle.train(request, files)
    assert_close(trained_of(worker), dict(oracle.trained), atol=3e-4)
    assert metrics["actor/ratio_min"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["training/step_samples"] == 12
