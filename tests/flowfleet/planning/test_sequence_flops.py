"""FLOPs of models that write text: torch's own counter on a dense model, formulas on a mixture and an adapter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flowfleet.models.families.qwen3 import Qwen3Adapter, Qwen3MoeAdapter
from flowfleet.planning.sequence_flops import sequence_flops
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import inject_lora
from tests.tiny_models.text import EXPERTS, SIZES

CPU = torch.device("cpu")
LENGTH = 11


def test_a_dense_model_costs_what_torch_counts() -> None:
    """torch counts whole squares of attention, of which a causal model has half and the diagonal."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation="eager")).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64))
    found = sequence_flops(Qwen3Adapter(model, None, dtype=torch.float32, device=CPU))
    assert found is not None
    square = found.pair * (LENGTH**2 - LENGTH * (LENGTH + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(found.sampling([LENGTH], [LENGTH]) + square)
    assert found.training([LENGTH], [LENGTH]) == 3 * found.sampling([LENGTH], [LENGTH])


def test_a_token_takes_top_k_experts_and_an_adapter_counts_three_times() -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).eval().requires_grad_(False)
    adapter = Qwen3MoeAdapter(model, None, dtype=torch.float32, device=CPU)
    experts: dict[str, nn.Module] = {"model": model}
    inject_lora(experts, LoraSpec(rank=3, alpha=6.0, target_modules=["q_proj"]))
    hidden, width, layers = 32, 16, 2
    attention = hidden * 32 + 2 * hidden * 16 + 32 * hidden
    each = attention + hidden * 8 + 2 * 3 * hidden * width
    lora = 3 * (hidden + 32)
    found = sequence_flops(adapter)
    assert found is not None
    assert found.token == 2 * layers * each
    assert found.adapted == 2 * layers * lora
    base = found.token * 5 + found.pair * 15 + found.written * 2
    assert found.sampling([5], [2]) == base + found.adapted * 5
    assert found.training([5], [2]) == 2 * base + 3 * found.adapted * 5
