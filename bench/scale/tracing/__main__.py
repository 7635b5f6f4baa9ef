"""What traces cost the controller: CPU seconds a sample with a collector and without, in pairs of runs that take turns.

    python -m bench.scale.tracing [--pairs 5] [--seconds 60]

CPU time is a process's own, so other work on the machine moves it little. The figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.scale.load import Load
from bench.scale.rehearsal import rehearse

LOAD = Load(replicas=200, jobs=20)
"""The rehearsal of docs/results.md at a fifth of its size."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale.tracing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured in each run")
    options = parser.parse_args()
    ratios = []
    for number in range(options.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        spent = {traces: cpu_a_sample(replace(LOAD, seconds=options.seconds, traces=traces)) for traces in order}
        ratios.append(spent[1] / spent[0])
        print(
            f"without {1e3 * spent[0]:.3f} ms a sample, with {1e3 * spent[1]:.3f}, ratio {ratios[-1]:.4f}", flush=True
        )
    print(f"median ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} … {max(ratios):.4f})")
    return 0


def cpu_a_sample(load: Load) -> float:
    """Seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result = rehearse(load, Path(folder) / "run")
    return float(result["processes"]["controller"]["cpu"]) / float(result["samples_per_s"])


if __name__ == "__main__":
    sys.exit(main())
