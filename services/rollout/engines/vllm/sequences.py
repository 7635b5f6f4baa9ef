"""Requests for sequences in vLLM's form, and their results. Used on the engine's thread alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from vllm.sampling_params import RequestOutputKind, SamplingParams

from flowfleet.data.sequences import StopReason, TokenTrajectory
from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.sequences.prompts import EncodedPrompt
from services.rollout.engines.base import (
    GeneratedBatch,
    GeneratedSample,
    GenerationRequest,
    PromptGroup,
    SequenceSampling,
)

LEAST_TEMPERATURE: Final = 1e-2
"""vLLM raises a lower one to this, 0 aside."""


@dataclass(eq=False)
class Running:
    """A request of ours under way. Its groups come out in their order, each once all its sequences have ended."""

    request: GenerationRequest
    prompts: Mapping[int, EncodedPrompt]
    cancelled: Callable[[], bool]
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Group and position in it of each sequence that has not ended, by vLLM's id."""
    ended: dict[int, dict[int, Any]] = field(default_factory=dict)
    """vLLM's outputs by group and place in it."""
    seconds: float = 0.0
    """Time of vLLM's steps since a group came out, by the share of sequences that it stepped for this request."""

    def take(self, name: str, output: Any) -> None:
        """Keeps the output of a sequence that has ended."""
        group, position = self.waiting.pop(name)
        self.ended.setdefault(group, {})[position] = output

    def complete(self, adapter: SequenceAdapter) -> list[GeneratedBatch]:
        """The groups that can come out now."""
        batches = []
        for group in self.request.groups:
            if group.group in self.ended and len(self.ended[group.group]) == len(group.indices):
                if any(number < group.group for number, _ in self.waiting.values()):
                    break
                outputs = self.ended.pop(group.group)
                batches.append(self._batch(adapter, group, [outputs[i] for i in range(len(group.indices))]))
        return batches

    def _batch(self, adapter: SequenceAdapter, group: PromptGroup, outputs: Sequence[Any]) -> GeneratedBatch:
        prompt, (seconds, self.seconds) = self.prompts[group.group], (self.seconds, 0.0)
        samples = tuple(
            self._sample(adapter, group, position, output.outputs[0]) for position, output in enumerate(outputs)
        )
        return GeneratedBatch(samples, {group.group: prompt}, {}, {"decode": seconds}, {"encoder": 1})

    def _sample(self, adapter: SequenceAdapter, group: PromptGroup, position: int, written: Any) -> GeneratedSample:
        settings = settings_of(self.request)
        token_ids = torch.tensor(list(written.token_ids), dtype=torch.int64)
        reason: StopReason = "stop" if written.finish_reason == "stop" else "length"
        record = None
        if self.request.record == "tokens":
            record = TokenTrajectory(
                token_ids=token_ids,
                log_probs=_log_probs(written),
                mask=torch.ones(len(token_ids), dtype=torch.bool),
                stop_reason=reason,
                routed_experts=_experts(adapter, written) if settings.routed_experts else None,
            )
        return GeneratedSample(
            group=group.group,
            index=group.indices[position],
            seed=group.seeds[position],
            record=record,
            text=adapter.text(token_ids),
            prompt_tokens=len(self.prompts[group.group].token_ids),
            num_tokens=len(token_ids),
            stop_reason=reason,
        )


def settings_of(request: GenerationRequest) -> SequenceSampling:
    """Raises ValueError for a request of pictures or videos."""
    if request.sequence is None:
        raise ValueError("sampling.sequence is not set: this replica's model writes text")
    return request.sequence


def check(request: GenerationRequest, prompts: Mapping[int, EncodedPrompt], longest: int) -> None:
    """Raises ValueError for settings that vLLM would change, and sequences of more than `longest` tokens."""
    settings = settings_of(request)
    if 0 < settings.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"rollout.sequence.temperature = {settings.temperature}: vLLM samples at {LEAST_TEMPERATURE} or above, or "
            "takes the likeliest token at 0"
        )
    for number, prompt in prompts.items():
        if len(prompt.token_ids) + settings.max_tokens > longest:
            raise ValueError(
                f"group {number}: its prompt of {len(prompt.token_ids)} tokens and rollout.sequence.max_tokens = "
                f"{settings.max_tokens} exceed the {longest} tokens that vLLM has room for: lower max_tokens"
            )


def parameters(request: GenerationRequest, adapter: SequenceAdapter, seed: int) -> SamplingParams:
    """How vLLM samples one sequence."""
    settings = settings_of(request)
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=seed,
        max_tokens=settings.max_tokens,
        stop=list(settings.stop),
        stop_token_ids=sorted(adapter.stop_ids),
        ignore_eos=True,  # The adapter knows them all.
        detokenize=bool(settings.stop),
        logprobs=0 if request.record == "tokens" else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _log_probs(written: Any) -> Tensor:
    pairs = zip(written.logprobs, written.token_ids, strict=True)
    return torch.tensor([log_probs[token].logprob for log_probs, token in pairs], dtype=torch.float32)


def _experts(adapter: SequenceAdapter, written: Any) -> Tensor | None:
    """(P + T - 1, layers that have experts, top_k) in the smallest type; None of a model without experts."""
    places = adapter.routing.layers
    if not places:
        return None
    return adapter.routing.packed(torch.from_numpy(written.routed_experts.astype("int16"))[:, list(places)])
