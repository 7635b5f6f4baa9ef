"""Attention over packed rows, against transformers' own with a mask between the sequences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowfleet.models.families.qwen3 import Qwen3Adapter
from flowfleet.models.sequences.attention import NAME, causal_layers
from tests.flowfleet.models.sequences.test_adapter import alone, drawn
from tests.tiny_models.text import SIZES


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


def adapter_of(model: Qwen3ForCausalLM) -> Qwen3Adapter:
    return Qwen3Adapter(model, None, dtype=torch.float32, device=torch.device("cpu"))


def test_values_and_gradients_are_those_of_a_mask_between_the_sequences(model: Qwen3ForCausalLM) -> None:
    """Positions that start over are transformers' own sign of a packed row."""
    sequences = drawn([(5, 7), (3, 9), (1, 1), (8, 4)])
    found: list[tuple[Any, list[Any]]] = []
    for _ in range(2):
        adapter = adapter_of(model)
        if found:  # the second time by transformers' mask
            model.config._attn_implementation = "sdpa"
        values = adapter.log_probs(sequences, temperature=1.0)
        model.zero_grad()
        torch.autograd.backward((values * torch.arange(len(values))).sum())
        found.append((values.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (own, gradients), (masked, expected) = found
    torch.testing.assert_close(own, masked, atol=1e-5, rtol=0)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_no_mask_is_made(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, seen = adapter_of(model), []
    for layer in causal_layers(model):
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    adapter.log_probs(drawn([(5, 7), (3, 9)]), temperature=1.0)
    assert seen == [None, None]


def test_lengths_that_do_not_fill_the_row_are_refused(model: Qwen3ForCausalLM) -> None:
    adapter = adapter_of(model)
    adapter.attention.lengths = (4, 5)
    with pytest.raises(ValueError, match="sequences of 9 tokens do not fill a row of 10"):
        model(input_ids=torch.zeros(1, 10, dtype=torch.int64))


def test_sliding_windows_keep_their_masks(tmp_path: Path) -> None:
    """Packed or alone, tokens beyond the window are not seen."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model = Qwen3ForCausalLM(config).eval()
    adapter = adapter_of(model)
    assert model.config._attn_implementation != NAME
    sequences = drawn([(5, 7), (3, 9)])
    packed = adapter.log_probs(sequences, temperature=1.0)
    torch.testing.assert_close(packed, alone(adapter, sequences, 1.0), atol=1e-5, rtol=0)
