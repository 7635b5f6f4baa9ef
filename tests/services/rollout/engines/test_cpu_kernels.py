"""vLLM's kernels for CPUs in torch, against attention and experts without pages and grouping."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from services.rollout.engines.vllm import cpu_kernels

BLOCK, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 8
LENGTHS, QUERIES = (9, 5, 1), (1, 5, 1)
"""A sequence that continues, one that begins, and one of a single token."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_paged_attention_is_that_of_each_sequence_alone() -> None:
    keys, values = ([draw(n, KV_HEADS, WIDTH, seed=10 * part + n) for n in LENGTHS] for part in (1, 2))
    queries = draw(sum(QUERIES), HEADS, WIDTH)
    table = torch.tensor([[7, 2, 5], [0, 9, 0], [4, 0, 0]], dtype=torch.int32)
    key_cache, value_cache = (torch.full((10, KV_HEADS, BLOCK, WIDTH), torch.nan, dtype=torch.float64) for _ in "kv")
    slots = torch.full((32,), 99)
    starts = torch.tensor([0, 9, 14, 15], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cpu_kernels.map_slots(starts, positions, table, slots, BLOCK)
    assert slots[:9].tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20]
    assert slots[15:].tolist() == [-1] * 17
    cpu_kernels.write_cache(torch.cat(keys), torch.cat(values), key_cache, value_cache, slots)
    output = torch.empty(sum(QUERIES), HEADS * WIDTH, dtype=torch.float64)
    begins = torch.tensor([0, 1, 6, 7], dtype=torch.int32)
    cpu_kernels.attend(
        queries, key_cache, value_cache, output, begins, torch.tensor(LENGTHS), 0.3, True, None, -1, table, 0.0
    )
    for number, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        rows = slice(int(begins[number]), int(begins[number + 1]))
        own = queries[rows].transpose(0, 1)
        key, value = (part[number].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (keys, values))
        scores = 0.3 * own @ key.transpose(1, 2)
        later = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
        expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        assert torch.allclose(output[rows], expected.transpose(0, 1).reshape(count, -1))


def test_experts_are_weighed_token_by_token() -> None:
    hidden, w13, w2 = draw(5, 6), draw(4, 2 * 3, 6, seed=1), draw(4, 6, 3, seed=2)
    experts, weights = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0]]), draw(5, 2, seed=3).abs()
    output = torch.empty(5, 6, dtype=torch.float64)
    cpu_kernels.compute_experts(output, hidden, w13, w2, None, None, weights, experts, False, "silu", "vec")
    for token in range(5):
        expected = torch.zeros(6, dtype=torch.float64)
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            gate, up = w13[expert, :3] @ hidden[token], w13[expert, 3:] @ hidden[token]
            expected += weight * (w2[expert] @ (F.silu(gate) * up))
        assert torch.allclose(output[token], expected)


def test_what_is_not_written_in_torch_is_refused() -> None:
    none = torch.empty(0)
    with pytest.raises(NotImplementedError, match="built without kernels"):
        cpu_kernels.attend(none, none, none, none, none, none, 1.0, True, None, 128, none, 0.0)
    with pytest.raises(NotImplementedError, match="gelu"):
        cpu_kernels.compute_experts(none, none, none, none, None, None, none, none, False, "gelu", "vec")


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-omni")
@pytest.mark.long
def test_linears_keep_their_weights_where_the_cpu_has_amx() -> None:
    """In a process of its own: the first import of vLLM chooses the platform for all that follows."""
    script = (
        "import torch; torch.cpu._is_amx_tile_supported = lambda: True\n"
        "from vllm.model_executor.layers import utils\n"
        "from services.rollout.engines.vllm import cpu_kernels\n"
        "before = utils.check_cpu_sgl_kernel(64, 64, torch.bfloat16)\n"
        "cpu_kernels.keep_weights()\n"
        "print('packed:', before, utils.check_cpu_sgl_kernel(64, 64, torch.bfloat16))\n"
    )
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "packed: True False" in done.stdout
