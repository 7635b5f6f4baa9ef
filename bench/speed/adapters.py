"""Adapters of random factors, which two processes draw alike."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flowfleet.models.registry import adapter_for
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights import lora
from flowfleet.weights.weights import dtype_of


def lora_spec(options: argparse.Namespace, *, merged: bool = False) -> LoraSpec:
    """An adapter on all of the family's targets."""
    targets = adapter_for(options.model).lora_targets
    rank = options.lora_rank
    return LoraSpec(rank=rank, alpha=2.0 * rank, target_modules=targets, merged=merged)


def adapter_state(options: argparse.Namespace) -> dict[str, Tensor]:
    """Random factors by published name, the same on both sides."""
    bare = adapter_for(options.model).load(
        options.model, dtype=dtype_of(options.dtype), components=("transformer",), load_format="empty"
    )
    shapes = {name: tensor.shape for name, tensor in lora.inject_lora(bare.experts, lora_spec(options)).items()}
    generator = torch.Generator().manual_seed(7)
    return {
        name: (torch.randn(shape, generator=generator) * options.lora_std).to(dtype_of(options.dtype))
        for name, shape in shapes.items()
    }
