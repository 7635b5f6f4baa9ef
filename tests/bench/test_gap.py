"""The gap bench at a tiny size: no gap where trainer and rollout compute alike, and the right one where they do not."""

import argparse
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench import gap
from recipes.full_size.make_model import write_checkpoint
from tests.bench.running import run_bench


def options(model: Path, micro_batch: int = 4) -> argparse.Namespace:
    flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--steps", "3", "--size", "64"]
    flags += ["--images", "4", "--batch", "4", "--micro-batch", str(micro_batch), "--guidance", "4"]
    return gap.parser().parse_args(flags)


def test_the_same_arithmetic_has_no_gap_and_a_shift_is_found(tmp_path: Path) -> None:
    model, samples = write_checkpoint(tmp_path / "model", tiny=True), tmp_path / "samples"
    gap.sample(options(model), "eager", samples)
    figures = gap.evaluate(options(model), "eager", samples)
    assert figures["rows"] == 4 * len(gap.WINDOW)
    assert figures["exact"] == 1.0
    assert figures["mean"] == figures["beyond_clip"] == 0.0

    shifted = load_file(samples)
    shifted["log_probs"][0, 0] -= 0.5  # one of eight rows
    save_file(shifted, samples)
    figures = gap.evaluate(options(model), "eager", samples)
    assert figures["mean"] == pytest.approx(0.5 / 8, rel=1e-5)
    assert figures["max"] == pytest.approx(0.5, rel=1e-5)
    assert figures["beyond_clip"] == 1 / 8

    other = gap.evaluate(options(model, micro_batch=3), "eager", samples)["mean"]
    assert math.isclose(other, 0.5 / 8, rel_tol=1e-3)  # other batches round otherwise


@pytest.mark.long
def test_the_command_compares_every_variant_with_every_trainer(tmp_path: Path) -> None:
    flags = "--tiny --device cpu --variants eager --trainers eager --images 2 --batch 2 --micro-batch 2"
    printed, (row,) = run_bench("gap", flags, tmp_path)
    assert (row["rollout"], row["trainer"], row["exact"]) == ("eager", "eager", 1.0)
    assert "| eager   | eager   | 0" in printed


@pytest.mark.long
@pytest.mark.parametrize("base", ["plain", "fp8"])
def test_a_separate_adapter_has_no_gap_where_a_merged_one_has(base: str, tmp_path: Path) -> None:
    """In bfloat16 on the CPU: equal batches, eager."""
    flags = f"--tiny --device cpu --base {base} --lora-rank 4 --variants eager,merged --trainers eager"
    sizes = " --images 8 --batch 4 --micro-batch 4"
    _, (eager, merged) = run_bench("gap", flags + sizes, tmp_path, {"FLOWFLEET_FP8_MIN_SIZE": "16"})
    assert eager["exact"] == 1
    assert eager["base"] == base
    assert merged["mean"] > 0
