"""The bench of models that write text: its sizes, its tables, and a tiny run of all stages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.performance_tables import sequence_tables
from bench.sequences.folder import BYTES_OF_LAYER, BYTES_OF_REST, NUM_LAYERS
from bench.sequences.speed import fitting
from bench.sequences.stages import differing

ROOT = Path(__file__).parents[3]


def test_layers_fill_half_of_the_memory() -> None:
    """An H200 has room for the whole model, an H100 for 31 of 48 layers: (0.5 * 79 GiB - 3.7 GB) / 1.25 GB."""
    assert fitting(139.8, BYTES_OF_LAYER, BYTES_OF_REST) == NUM_LAYERS
    assert fitting(79.2, BYTES_OF_LAYER, BYTES_OF_REST) == 31
    assert fitting(4, BYTES_OF_LAYER, BYTES_OF_REST) == 1


def test_without_a_measurement_there_are_no_tables() -> None:
    assert sequence_tables({"rollout": {"figures": []}}) == "Not measured yet."


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
    command = [sys.executable, "-m", "bench.sequences.speed", "--tiny", "--engine", engine]
    command += ["--json", str(tmp_path / "sequences.json"), "--budget", "400"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=570)
    assert done.returncode == 0
    (figures,) = json.loads((tmp_path / "sequences.json").read_text())["figures"]
    assert figures["rollout"]["tokens_per_s"] > 0
    assert figures["train"]["tokens_per_s"] > 0
    for gap in figures["train"]["gap"].values():
        assert gap["max"] < 1e-5  # float32
        assert gap["beyond_clip"] == gap["rerouted"] == gap["rerouted_choices"] == 0
    sent = figures["publish"]
    assert sent["is_verified"]
    assert sent["is_new"]
    assert sent["flipped_element_found"]
    assert sent["exact_after"] == 1.0 or engine == "vllm"
    assert "| 2, float32 | 8 × (24 + 8) |" in done.stdout.decode()
