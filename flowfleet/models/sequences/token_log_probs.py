"""Log-probs of tokens from hidden states, a chunk of tokens at a time: no logits of a whole row are ever held."""

from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS: Final = 2**26
"""Logits of a chunk: 256 MiB in float32."""


def token_log_probs(hidden: Tensor, head: nn.Module, token_ids: Tensor, temperature: float) -> Tensor:
    """(N,) float32: log softmax(head(hidden) / temperature) at `token_ids`, by a log-softmax in float32.

    With gradient a chunk's logits are computed again in the backward.

    Args:
        hidden: (N, width) in the model's dtype.
        head: gives logits (..., vocabulary).
        token_ids: (N,) int64.
        temperature: above 0.
    """
    size = max(1, CHUNK_ELEMENTS // (int(getattr(head, "out_features", 0)) or 2**17))
    parts = []
    for start in range(0, len(token_ids), size):
        rows, targets = hidden[start : start + size], token_ids[start : start + size]
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, rows, head, targets, temperature, use_reentrant=False))
        else:
            parts.append(_chunk(rows, head, targets, temperature))
    return torch.cat(parts)


def _chunk(hidden: Tensor, head: nn.Module, token_ids: Tensor, temperature: float) -> Tensor:
    logits: Tensor = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, token_ids[:, None])[:, 0]
    return chosen - logits.logsumexp(-1)
