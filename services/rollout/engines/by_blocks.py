"""Loads a transformer onto a device that has room for it in float8 alone: a block is read, rounded, then the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowfleet.models.base import ModelAdapter
from flowfleet.models.files import WeightFiles
from flowfleet.models.loading import StoredNames, fill_dummy
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.quantization import layers
from flowfleet.weights.weights import dtype_of
from services.rollout.engines.acceleration import blocks
from services.rollout.engines.local import load_format


def load_by_blocks(
    kind: Any, model: ModelSpec, device: torch.device, beat: Callable[[], None] = lambda: None
) -> ModelAdapter:
    """Loads all components of a family whose checkpoints use tensor names of their own (`stored`). The transformer
    becomes a float8 base.

    Raises ValueError as the family's `load`, and for a device or dtype without float8 products.
    """
    dtype, format = dtype_of(model.dtype), load_format(model)
    layers.require_fp8(device, dtype, "model.base = 'fp8'", emulated=True)
    adapter: ModelAdapter = kind.load(
        model.path, dtype=dtype, device=device, components=("text_encoder", "vae"), load_format=format
    )
    bare: ModelAdapter = kind.load(model.path, dtype=dtype, components=("transformer",), load_format="empty")
    files = None if format == "dummy" else WeightFiles(Path(model.path), kind.layout)

    def fill(component: str, module: nn.Module, prefix: str) -> None:
        if files is None:
            fill_dummy(module, f"{component}.{prefix}".rstrip("."), device)
        else:
            files.fill(module, _Under(prefix, kind.stored), device, dtype)
        beat()

    for component, expert in bare.experts.items():
        for name, block in blocks(expert).items():
            fill(component, block, f"{name}.")
            layers.replace_weights([block])
        fill(component, expert, "")
        setattr(adapter.pipeline, component, expert.to(device))
    return adapter


class _Under:
    """`StoredNames` of a part of a model."""

    def __init__(self, prefix: str, whole: StoredNames) -> None:
        self._prefix, self._whole = prefix, whole

    def of(self, name: str, rows: int) -> list[str]:
        return self._whole.of(self._prefix + name, rows)
