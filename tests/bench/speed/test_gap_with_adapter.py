"""The gap of rollouts with an adapter, at a tiny size."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.long
@pytest.mark.parametrize("base", ["plain", "fp8"])
def test_a_separate_adapter_has_no_gap_where_a_merged_one_has(base: str) -> None:
    """In bfloat16 on the CPU: equal batches, eager."""
    command = [sys.executable, "-m", "bench.speed.gap", "--tiny", "--device", "cpu", "--base", base, "--lora-rank", "4"]
    command += [
        "--variants",
        "eager,merged",
        "--trainers",
        "eager",
        "--images",
        "8",
        "--batch",
        "4",
        "--micro-batch",
        "4",
    ]
    environment = {**os.environ, "FLOWFLEET_FP8_MIN_SIZE": "16"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    rows: dict[str, Any] = {row["rollout"]: row for row in map(json.loads, printed.splitlines()[:2])}
    assert rows["eager"]["exact"] == 1
    assert rows["eager"]["base"] == base
    assert rows["merged"]["mean"] > 0
