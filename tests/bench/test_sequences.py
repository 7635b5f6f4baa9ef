"""The bench of models that write text: its sizes, and a tiny run of all stages."""

from pathlib import Path

import pytest
import torch

from bench.sequences.__main__ import fitting
from bench.sequences.stages import differing
from recipes.full_size.make_thinker import NUM_LAYERS
from tests.bench.running import run_bench


def test_layers_fill_half_of_the_memory() -> None:
    """An H200 has room for the whole model, an H100 for 31 of 48 layers: (0.5 * 79 GiB - 3.7 GB) / 1.25 GB."""
    assert fitting(139.8) == NUM_LAYERS
    assert fitting(79.2) == 31
    assert fitting(4) == 1


def test_experts_differ_by_token_and_layer_in_any_order() -> None:
    recorded = [
        torch.tensor([[[0, 1], [2, 3]]], dtype=torch.uint8),
        torch.tensor([[[4, 5], [6, 7]]], dtype=torch.uint8),
    ]
    chosen = torch.tensor([[[1, 0], [2, 4]], [[4, 5], [7, 6]]])
    assert differing(chosen, recorded).tolist() == [[False, True], [False, False]]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_tiny_run_measures_every_stage(tmp_path: Path, engine: str) -> None:
    printed, (figures,) = run_bench("sequences", f"--tiny --engine {engine}", tmp_path)
    assert figures["rollout"]["tokens_per_s"] > 0
    assert figures["train"]["tokens_per_s"] > 0
    for gap in figures["train"]["gap"].values():
        assert gap["max"] < 1e-5  # float32
        assert gap["beyond_clip"] == gap["rerouted"] == gap["rerouted_choices"] == 0
    assert f"| {engine}" in printed
