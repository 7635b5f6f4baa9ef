"""What the planner says of trainer and rollout, which it may not import, is what they do."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flowfleet.planning import activations, facts, memory
from flowfleet.planning.skeleton import load_skeleton
from flowfleet.quantization import layers
from services.rollout.engines import acceleration
from services.trainer.optim import moments, quantized
from services.trainer.parallel import blocks


def test_constants_are_those_of_the_trainer() -> None:
    assert activations.RECOMPUTED_BELOW == blocks.RECOMPUTED_BELOW
    products = {op.overloadpacket.__name__: place for op, place in blocks._PRODUCTS.items()}
    assert products == activations.PRODUCTS
    attention = {op.overloadpacket.__name__ for op in blocks._ATTENTION}
    assert all(activations._is_costly(name, ()) for name in attention)
    assert memory.BLOCK_8BIT == quantized.BLOCK
    assert memory.CHUNK_8BIT == moments.CHUNK_ELEMENTS
    assert (memory.HOST_BUCKET, memory.FAR_BUCKET) == (moments.BUCKET_ELEMENTS, moments.FAR_BUCKET_ELEMENTS)
    assert memory.HOST_SLOTS == moments._SLOTS


class Block(nn.Module):
    """Linears on both sides of each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1024, 1024)
        self.wide = nn.Linear(1040, 4096)
        self.short = nn.Linear(1008, 4096)
        self.uneven = nn.Linear(1032, 1024)
        self.norm1_context = nn.Linear(1024, 1024)
        self.filter = nn.Conv2d(1024, 1024, 1)


class Expert(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.proj_out = nn.Linear(2048, 2048)


@pytest.mark.parametrize("kind", ["rules", "qwen_image"])
def test_fp8_copies_are_of_what_rollouts_quantize(kind: str, full_size: Path) -> None:
    if kind == "rules":
        with torch.device("meta"):
            expert: nn.Module = Expert().to(torch.bfloat16)
    else:
        expert = load_skeleton(full_size, torch.bfloat16, components=("transformer",)).experts["transformer"]
    planned = {id(weight) for weight in facts._quantized(expert)}

    layers.add_copies(acceleration.blocks(expert).values())

    quantized = {id(module.weight) for module in expert.modules() if "fp8_weight" in module._buffers}
    assert planned == quantized
    assert len(planned) == 4 if kind == "rules" else len(planned) > 60
