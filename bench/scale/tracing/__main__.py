"""What traces cost the controller: CPU seconds a sample with a collector and without, of two rehearsals side by side.

    python -m bench.scale.tracing [--pairs 5] [--seconds 60] [--control]

Side by side both meet whatever slows the machine; one after the other, runs without traces differ by a fifth.
`--control` sends traces in neither: what the measure itself is off by. The figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.scale.load import Load
from bench.scale.rehearsal import rehearse

LOAD = Load(replicas=100, jobs=10, processes=1)
"""Each of the two: a tenth of the rehearsal of docs/results.md."""
NETS = (64, 80)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale.tracing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured in each run")
    parser.add_argument("--control", action="store_true", help="send traces in neither of a pair")
    options = parser.parse_args()
    ratios = []
    for number in range(options.pairs):
        nets = NETS if number % 2 == 0 else NETS[::-1]
        pair = [
            replace(LOAD, seconds=options.seconds, traces=traces, net=net)
            for traces, net in zip((0, 0 if options.control else 1), nets, strict=True)
        ]
        with ThreadPoolExecutor(len(pair)) as side_by_side:
            without, with_traces = side_by_side.map(cpu_a_sample, pair)
        ratios.append(with_traces / without)
        print(
            f"without {1e3 * without:.3f} ms a sample, with {1e3 * with_traces:.3f}, ratio {ratios[-1]:.4f}", flush=True
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
