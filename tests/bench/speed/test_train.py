"""The trainer's bench, on the tiny model of the same parts."""

import json
import math
import subprocess
import sys

import pytest

from tests.services.trainer.processes import START_TIMEOUT_S


def test_a_row_tells_what_was_run_and_how_fast() -> None:
    options = ["--tiny", "--layers", "1", "--size", "64", "--batch", "2", "--window", "1", "--text", "16"]
    settings = ["--checkpointing", "full", "--state", "host", "--warm-up", "1", "--steps", "1"]
    command = [sys.executable, "-m", "bench.speed.train", *options, *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_TIMEOUT_S, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["world_size"], row["mode"], row["state"], row["checkpointing"]) == (1, "lora", "host", "full")
    assert row["images_per_s_and_rank"] == pytest.approx(2 / row["update_s"], rel=0.01)
    assert 2 * row["ms_per_row"] + row["optimizer_ms"] == pytest.approx(1e3 * row["update_s"], rel=0.01)
    assert row["grad_norm"] > 0
    assert math.isfinite(row["grad_norm"])
    assert "out_of_memory" not in row


def test_shapes_may_be_of_another_checkpoint_with_prompts_of_several_lengths() -> None:
    options = ["--model", "recipes/tiny/model", "--mode", "full", "--size", "64", "--batch", "2", "--window", "1"]
    settings = ["--text", "16", "--padded", "--deterministic", "--warm-up", "1", "--steps", "1"]
    command = [sys.executable, "-m", "bench.speed.train", *options, *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_TIMEOUT_S, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["model"], row["padded"], row["deterministic"]) == ("recipes/tiny/model", True, True)
    assert row["grad_norm"] > 0
