"""torch.compile of a transformer's blocks, which must not fall back to eager without a word."""

from typing import Any

import torch

MOST_KINDS = 64
"""Versions of the blocks' common code that may be compiled: with and without gradient, mask and adapter, by width of
the text, by kind of block, for each expert; and of a decoder's, by channels and rows. torch's own limit of 8 ends
compiling silently."""


def prepare() -> None:
    """Before blocks are compiled: allows `MOST_KINDS`, and has torch log each graph break, unless `TORCH_LOGS` is set.
    Under activation checkpointing a block with one runs in eager as a whole."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    logs: Any = torch._logging
    logs.set_logs(graph_breaks=True)
