"""Does a model learn as well with another rollout engine, and on accelerators? A recipe is trained, and its curve held
against the seeds in docs/results.md, which the diffusers engine sampled on CPUs.

    python -m bench.learning.proof --recipe tiny_ocr --engine vllm-omni [--seeds 1 2 3] [--cpu]

On two accelerators the rollout has the first and the trainer the second, and what is trained, be it all weights or an
adapter, travels by NCCL. With one, or none, all weights go by Gloo and an adapter as a blob. The figures are a line of
JSON a seed; stderr tells people.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.learning.curves import PAGE
from bench.learning.results import Result, read_result
from flowfleet.demo.run import run_demo
from flowfleet.hardware.accelerators import visible_devices

CELL = re.compile(r"([0-9.]+) \(([0-9.]+) … ([0-9.]+)\)")
"""Mean (least … greatest)."""
AFTER = 3
"""Column of the held-out reward after training."""


def main() -> int:
    options = _parser().parse_args()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="proof-") as scratch:
            directory = (options.directory or Path(scratch)) / str(seed)
            changes = [f"seed={seed}", "schedule.validate_every=2", *options.set]
            recipe = Path(f"recipes/{options.recipe}.toml")
            console = Console(file=sys.stderr, width=160)
            run_demo(recipe, directory, changes, console, started=datetime.now(UTC), engine=options.engine)
            figures = proof(options.recipe, read_result(directory), PAGE.read_text())
        settings = {"engine": options.engine, "seed": seed, "devices": list(visible_devices()) or ["cpu"]}
        print(json.dumps({"bench": "proof", "settings": settings, **figures}), flush=True)
    return 0


def proof(recipe: str, result: Result, page: str) -> dict[str, Any]:
    """What is held against the seeds in the page's table."""
    mean, low, high = seeds_after(recipe, page)
    after = result.summary["held_out_reward_after"]
    return {
        "recipe": recipe,
        "before": result.summary["held_out_reward_before"],
        "after": after,
        "ci95_of_gain": result.summary["bootstrap_ci95"],
        "curve": [[point.generated, round(point.reward, 4)] for point in result.points],
        "seeds": {"mean": mean, "low": low, "high": high},
        "within_spread": low <= round(after, 3) <= high,  # the page has three digits
        "training_s": result.summary["training_seconds"],
    }


def seeds_after(recipe: str, page: str) -> tuple[float, float, float]:
    """Mean, least and greatest held-out reward after training of a recipe's seeds. ValueError: not in the table."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].strip() == f"[{recipe}](../recipes/{recipe}.toml)" and (found := CELL.fullmatch(cells[AFTER])):
            mean, low, high = map(float, found.groups())
            return mean, low, high
    raise ValueError(f"docs/results.md has no seeds of {recipe}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny_ocr")
    parser.add_argument("--engine", choices=("diffusers", "vllm-omni"), default="vllm-omni")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--cpu", action="store_true", help="use no accelerator")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job; repeatable")
    parser.add_argument("--directory", type=Path, help="keep each run's results here, by seed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
