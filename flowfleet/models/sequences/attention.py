"""Attention of a language model over packed rows: each sequence by itself, without a mask.

A mask that separates the sequences of a row has as many elements as the row has tokens, squared, and the kernels that
take one compute all of them. Here a layer's attention is one causal call per sequence. A sequence alone in its row is
computed exactly as in a rollout.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME: Final = "flowfleet_packed"
"""Name of this attention in transformers, which makes no mask for it."""


class PackedAttention:
    """Replaces the attention of a model's causal layers."""

    def __init__(self, model: nn.Module | None) -> None:
        self.lengths: tuple[int, ...] = ()
        """Tokens of each sequence in the next rows; empty: rows hold one sequence each. Kept until it is set again, for
        a block that is computed again in the backward."""
        AttentionInterface.register(NAME, attend)
        for layer in () if model is None else causal_layers(model):
            layer.packing = self
            layer.config._attn_implementation = NAME


def causal_layers(model: nn.Module) -> list[Any]:
    """The attention layers of the language model; none of a model with sliding windows, which need a mask."""
    layers = [module for module in model.modules() if getattr(module, "is_causal", False) and hasattr(module, "q_proj")]
    return [] if any(getattr(layer, "sliding_window", None) for layer in layers) else layers


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function. `query` is (B, heads, Q, D), `key` and `value` (B, heads, K, D); the result is
    (B, Q, heads, D). B is 1 in packed rows. Raises ValueError for lengths that do not fill the row."""
    packing: Any = module.packing
    lengths: Sequence[int] = packing.lengths
    if len(lengths) < 2 or query.shape[2] == 1:
        return _one(module, query, key, value, attention_mask, **kwargs)
    if sum(lengths) != query.shape[2] or query.shape != (1, *query.shape[1:]):
        raise ValueError(f"sequences of {sum(lengths)} tokens do not fill a row of {query.shape[2]}")
    parts = (torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value))
    return torch.cat([_one(module, *part, None, **kwargs)[0] for part in zip(*parts, strict=True)], dim=1), None


def _one(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, *args, **kwargs)
    return attended
