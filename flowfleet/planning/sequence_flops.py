"""Floating-point operations of a model that writes text, from the shapes of its parameters.

A multiply-add is two. A token goes through every matrix of its layer and `top_k` of a mixture's experts; a query meets
the keys up to its own. What is point-wise does not count, nor do the encoders of pictures and sounds. The convention of
a training row is that of flops.py: full fine-tuning is 3 F, LoRA 2 F + 3 A.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.sequences.attention import causal_layers


@dataclass(frozen=True)
class SequenceFlops:
    """Costs of one forward."""

    token: float
    """The layers' matrices, for each input token."""
    adapted: float
    """A LoRA's matrices, for each input token."""
    pair: float
    """Attention, for each query and key."""
    written: float
    """The output layer, for each token that is predicted."""
    is_lora: bool

    def sampling(self, inputs: Iterable[int], written: Iterable[int]) -> float:
        """FLOPs of forwards of whole sequences, LoRA's own included. `inputs` and `written`: tokens of each."""
        lengths = list(inputs)
        return self._base(lengths, written) + self.adapted * sum(lengths)

    def training(self, inputs: Iterable[int], written: Iterable[int]) -> float:
        """The same with their backwards."""
        lengths = list(inputs)
        base = self._base(lengths, written)
        return 2 * base + 3 * self.adapted * sum(lengths) if self.is_lora else 3 * base

    def _base(self, lengths: Iterable[int], written: Iterable[int]) -> float:
        each = (self.token * length + self.pair * length * (length + 1) / 2 for length in lengths)
        return sum(each) + self.written * sum(written)


def sequence_flops(adapter: SequenceAdapter) -> SequenceFlops | None:
    """Counts a loaded model, which may be on the meta device, or spread over ranks. None for one whose layers of
    attention are not found, such as BAGEL's."""
    attentions = causal_layers(adapter.transformer)
    if not attentions:
        return None
    layers = [module for module in adapter.transformer.modules() if getattr(module, "self_attn", None) in attentions]
    named = [(name, parameter) for layer in layers for name, parameter in layer.named_parameters()]
    lora = [2.0 * tensor.numel() for name, tensor in named if ".lora_" in name]
    base = [_matrix(tensor, adapter.routing.top_k) for name, tensor in named if ".lora_" not in name]
    head: Any = adapter.transformer.lm_head
    pairs = sum(4.0 * layer.config.num_attention_heads * layer.head_dim for layer in attentions)
    return SequenceFlops(sum(base), sum(lora), pairs, 2.0 * head.weight.numel(), bool(lora))


def _matrix(tensor: Tensor, top_k: int) -> float:
    """Cost of a token in a parameter of shape (out, in), or (experts, out, in)."""
    if tensor.dim() < 2:
        return 0.0
    return 2.0 * tensor.numel() * (top_k / len(tensor) if tensor.dim() == 3 else 1.0)
