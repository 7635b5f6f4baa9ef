"""The gap bench at a tiny size: no gap where trainer and rollout compute alike, and the right one where they do not."""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench.speed import gap
from bench.speed.full_size import write_checkpoint


def options(model: Path, name: str, samples: Path, micro_batch: int = 4) -> argparse.Namespace:
    flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--steps", "3", "--size", "64"]
    flags += ["--images", "4", "--batch", "4", "--micro-batch", str(micro_batch), "--guidance", "4"]
    return gap.parser().parse_args([*flags, "--name", name, "--samples", str(samples)])


@pytest.mark.anyio
async def test_the_same_arithmetic_has_no_gap_and_a_shift_is_found(tmp_path: Path) -> None:
    model, samples = write_checkpoint(tmp_path / "model", tiny=True), tmp_path / "samples"
    await gap.sample(options(model, "eager", samples))
    figures = gap.evaluate(options(model, "eager", samples))
    assert figures["rows"] == 4 * len(gap.WINDOW)
    assert figures["exact"] == 1.0
    assert figures["mean"] == figures["beyond_clip"] == 0.0

    shifted = load_file(samples)
    shifted["log_probs"][0, 0] -= 0.5  # one of eight rows
    save_file(shifted, samples)
    figures = gap.evaluate(options(model, "eager", samples))
    assert figures["mean"] == pytest.approx(0.5 / 8, rel=1e-5)
    assert figures["max"] == pytest.approx(0.5, rel=1e-5)
    assert figures["beyond_clip"] == 1 / 8

    other = gap.evaluate(options(model, "eager", samples, micro_batch=3))["mean"]
    assert math.isclose(other, 0.5 / 8, rel_tol=1e-3)  # other batches round otherwise


@pytest.mark.long
def test_the_command_compares_every_variant_with_every_trainer(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "bench.speed.gap",
        "--tiny",
        "--device",
        "cpu",
        "--variants",
        "eager",
        "--trainers",
        "eager",
    ]
    argv += ["--images", "2", "--batch", "2", "--micro-batch", "2", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["rollout"], row["trainer"], row["exact"]) == ("eager", "eager", 1.0)
    assert json.loads(done.stdout.splitlines()[0]) == row
    assert "| eager | eager | 0.00e+00 |" in done.stdout
