"""The bench of sequence parallelism, on a tiny model."""

import json
import subprocess
import sys

import pytest

from bench.speed.parallel import side_by_side
from tests.services.trainer.processes import START_TIMEOUT_S


def test_two_ranks_compute_what_one_does() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "bench.speed.parallel", "--tiny", "--eager", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_TIMEOUT_S, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["tokens"] == 3 * 4 * 4
    assert row["degrees"].keys() == {"1", "2"}
    for figures in row["degrees"].values():
        assert figures["finite"]
        assert figures["largest_difference"] < 1e-5
        assert 0 < figures["forward_s"] < figures["step_s"]


def test_degrees_run_side_by_side_where_they_fit() -> None:
    assert side_by_side([1, 2, 4], 4) == [[1, 2], [4]]
    assert side_by_side([1, 2], 2) == [[1], [2]]
    with pytest.raises(ValueError, match="--degrees 4: torchrun started 2 ranks"):
        side_by_side([4], 2)
