"""Jobs on tiny models that write text, and sequences to train on: drawn by the model itself, stored in a blob store."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, BlobRef, Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.redis import keys
from flowfleet.seeds import sample_seed
from flowfleet.weights.weights import dtype_of
from tests.services.trainer.steps import JOB
from tests.tiny_models.text import VOCABULARY


def make_spec(path: Path, algorithm: str = "grpo", /, **parts: dict[str, Any]) -> JobSpec:
    """3 prompts × 2 sequences of 1 to 8 tokens, one update."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"train": "unused.txt"},
        "rewards": {"exact_match": {}},
        "algorithm": {"name": algorithm},
        "rollout": {"prompts_per_step": 3, "group_size": 2, "sequence": {"max_tokens": 8, "temperature": 0.8}},
        "trainer": {
            "micro_batch_tokens": 24,
            "updates_per_step": 1,
            "threads": 1,
            "lora": {"rank": 3, "alpha": 6.0},
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
        },
    }
    for name, part in parts.items():
        base[name] = {**base.get(name, {}), **part}
    return parse_job(base)


class Writer:
    """Writes the sequences of training steps, as a rollout would."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.adapter: SequenceAdapter = sequence_adapter_for(spec.model.path).load(
            spec.model.path, dtype=dtype_of(spec.model.dtype), components=("transformer",)
        )

    def write(self, blobs: SyncBlobs, step: int, *, masked: bool = False) -> TrainStepRequest:
        """The whole TrainStepRequest of a step, with made-up advantages that sum to 0 in each group. `masked`: the
        policy did not write a sequence's second token."""
        rollout, request = self._spec.rollout, TrainStepRequest(job_id=JOB, step=step)
        for group in range(rollout.prompts_per_step):
            generator = torch.Generator().manual_seed(100 * step + group)
            prompt = torch.randint(2, VOCABULARY, (2 + 3 * group,), generator=generator)
            ref = blobs.put(keys.blob(JOB, "embeds", step, group), PromptBlob(prompt).to_bytes())
            for index in range(rollout.group_size):
                written = self._written(prompt, 1 + (5 * index + 3 * group) % 8, generator, masked=masked)
                sample = self._sample(blobs, (step, group, index), written)
                sample.prompt_embeds.CopyFrom(ref)
                sample.prompt_tokens = len(prompt)
                sign = 1.0 if index % 2 else -1.0
                request.samples.append(TrainSample(sample=sample, advantage=sign * (1 + group / 2), reward=0.5))
        return request

    @torch.no_grad()
    def _written(self, prompt: Tensor, length: int, generator: torch.Generator, *, masked: bool) -> TokenTrajectory:
        part, ids = self._spec.rollout.sequence, prompt
        for _ in range(length):
            logits = self.adapter.transformer(input_ids=ids[None]).logits[0, -1] / part.temperature
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
        tokens = Tokens(EncodedPrompt(prompt), ids[len(prompt) :])
        with self.adapter.routing.recording() as record:
            log_probs = self.adapter.log_probs([tokens], temperature=part.temperature)
        mask = torch.ones(length, dtype=torch.bool)
        mask[1:2] = not masked
        routed = None
        if part.routed_experts and record:
            routed = torch.stack([torch.cat(layer) for layer in record], 1).to(torch.uint8)
        return TokenTrajectory(tokens.token_ids, log_probs, mask, "length", routed)

    def _sample(self, blobs: SyncBlobs, place: tuple[int, int, int], written: TokenTrajectory) -> Sample:
        step, group, index = place
        trajectory: BlobRef = blobs.put(keys.blob(JOB, "trajectory", *place), written.to_bytes())
        return Sample(
            id=SampleId(job_id=JOB, step=step, group=group, index=index),
            purpose=PURPOSE_TRAIN,
            seed=sample_seed(self._spec.seed, *place),
            trajectory=trajectory,
            num_tokens=len(written.token_ids),
            stop_reason=written.stop_reason,
        )
