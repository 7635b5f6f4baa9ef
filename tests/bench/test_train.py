"""The trainer's bench, on the tiny model of the same parts."""

import math
from pathlib import Path

import pytest

from tests.bench.running import run_bench


def test_a_row_tells_what_was_run_and_how_fast(tmp_path: Path) -> None:
    flags = "--tiny --layers 1 --size 64 --batch 2 --window 1 --text 16 --checkpointing full --state host"
    printed, (row,) = run_bench("train", f"{flags} --warm-up 1 --steps 1", tmp_path)
    assert (row["world_size"], row["mode"], row["state"], row["checkpointing"]) == (1, "lora", "host", "full")
    assert row["images_per_s_and_rank"] == pytest.approx(2 / row["update_s"], rel=0.01)
    assert 2 * row["ms_per_row"] + row["optimizer_ms"] == pytest.approx(1e3 * row["update_s"], rel=0.01)
    assert row["grad_norm"] > 0
    assert math.isfinite(row["grad_norm"])
    assert "out_of_memory" not in row
    assert f"{row['ms_per_row']:.4g}" in printed


def test_shapes_may_be_of_another_checkpoint(tmp_path: Path) -> None:
    flags = "--model recipes/tiny/model --mode full --size 64 --batch 2 --window 1 --text 16 --deterministic"
    _, (row,) = run_bench("train", f"{flags} --warm-up 1 --steps 1", tmp_path)
    assert (row["model"], row["deterministic"]) == ("recipes/tiny/model", True)
    assert row["grad_norm"] > 0
