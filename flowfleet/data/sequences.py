"""Safetensors blobs of a written sequence, and of the prompt that its group shares, for trainers.

The format is that of flows in trajectories.py: a blob's metadata names its kind, and whatever does not fit is DataLoss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from flowfleet.data.trajectories import build, check_tensor, load_blob, save_blob
from flowfleet.models.sequences.prompts import EncodedPrompt

_TOKENS: Final = "flowfleet.tokens.v1"
_PROMPT: Final = "flowfleet.prompt.v1"
_INPUT: Final = "input."

StopReason = Literal["stop", "length"]
"""stop: the model ended it, or a stop text did. length: it was cut at the most tokens that were asked for."""
_REASONS: Final[tuple[StopReason, ...]] = ("stop", "length")


@dataclass(frozen=True)
class TokenTrajectory:
    """Sequence that was written after a prompt of P tokens. Raises ValueError when it does not fit."""

    token_ids: Tensor
    """(T,) int64, the one that stopped it included."""
    log_probs: Tensor
    """(T,) float32: the rollout's own, of all tokens at the temperature that was sampled with."""
    mask: Tensor
    """(T,) bool: True where the policy wrote the token, so that it is trained."""
    stop_reason: StopReason
    routed_experts: Tensor | None = None
    """(P + T - 1, layers, top_k) uint8 or int16: the experts of each token that was an input, in a mixture of experts;
    the layers are those that have experts, in their order."""

    def __post_init__(self) -> None:
        count = self.token_ids.numel()
        check_tensor("token_ids", self.token_ids, (count,), torch.int64)
        check_tensor("log_probs", self.log_probs, (count,), torch.float32)
        check_tensor("mask", self.mask, (count,), torch.bool)
        if count == 0 or int(self.token_ids.min()) < 0:
            raise ValueError("a sequence needs at least one token, and ids from 0 on")
        if not bool(self.mask.any()):
            raise ValueError("mask: no token was written by the policy")
        if self.stop_reason not in _REASONS:
            raise ValueError(f"stop_reason {self.stop_reason!r} is not one of {', '.join(_REASONS)}")
        if self.routed_experts is not None:
            _check_experts(self.routed_experts, count)

    def to_bytes(self) -> bytes:
        """safetensors."""
        tensors = {"token_ids": self.token_ids, "log_probs": self.log_probs, "mask": self.mask}
        if self.routed_experts is not None:
            tensors["routed_experts"] = self.routed_experts
        return save_blob(tensors | {"stop_reason": torch.tensor(_REASONS.index(self.stop_reason))}, _TOKENS)

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenTrajectory:
        """On the CPU. DataLoss when it is not such a blob."""
        tensors: dict[str, Any] = dict(load_blob(data, _TOKENS))
        reason = tensors.get("stop_reason")
        if isinstance(reason, Tensor) and reason.numel() == 1 and 0 <= int(reason) < len(_REASONS):
            tensors["stop_reason"] = _REASONS[int(reason)]
        return build(cls, tensors)


@dataclass(frozen=True)
class PromptBlob:
    """A group's prompt as the model takes it: tokens, and what the media that it brings became."""

    token_ids: Tensor
    """(P,) int64, those that stand for media included."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's further inputs, by the names of its arguments."""

    def __post_init__(self) -> None:
        check_tensor("token_ids", self.token_ids, (self.token_ids.numel(),), torch.int64)
        if self.token_ids.numel() == 0 or int(self.token_ids.min()) < 0:
            raise ValueError("a prompt needs at least one token, and ids from 0 on")

    def to_bytes(self) -> bytes:
        """safetensors."""
        inputs = {_INPUT + name: tensor for name, tensor in self.inputs.items()}
        return save_blob({"token_ids": self.token_ids, **inputs}, _PROMPT)

    @classmethod
    def from_bytes(cls, data: bytes) -> PromptBlob:
        """On the CPU. DataLoss when it is not such a blob."""
        tensors = load_blob(data, _PROMPT)
        inputs = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_INPUT)}
        named: dict[str, Any] = {"inputs": {name.removeprefix(_INPUT): value for name, value in inputs.items()}}
        return build(cls, cast(dict[str, Any], tensors) | named)

    @classmethod
    def of(cls, prompt: EncodedPrompt) -> PromptBlob:
        """From what an adapter encoded."""
        return cls(prompt.token_ids, prompt.inputs)

    def encoded(self) -> EncodedPrompt:
        """Returns the prompt as an adapter's `log_probs` takes it."""
        return EncodedPrompt(self.token_ids, self.inputs)


def _check_experts(experts: Tensor, num_tokens: int) -> None:
    if experts.dim() != 3 or experts.dtype not in (torch.uint8, torch.int16):
        raise ValueError(
            f"routed_experts must be uint8 or int16 (tokens, layers, top_k), not {experts.dtype} {(*experts.shape,)}"
        )
    if len(experts) < num_tokens or experts.numel() == 0 or int(experts.min()) < 0:
        raise ValueError(f"routed_experts has {len(experts)} rows for {num_tokens} tokens and their prompt")
