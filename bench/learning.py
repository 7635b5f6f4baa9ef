"""The figures of docs/learning.md: the demo's recipes, each with several seeds, every run on a fresh stack.

    python -m bench.learning        runs into runs/learning/<recipe>-<seed>; a run that is there is kept

Writes docs/images/learning.png and prints the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from flowfleet.demo.plots import Curve, learning_curves
from flowfleet.demo.run import run_demo

RECIPES = {"LoRA": "tiny_ocr", "full fine-tuning": "tiny_ocr_full"}
PICTURE = Path("docs/images/learning.png")


def main() -> None:
    options = _parser().parse_args()
    results: dict[str, list[Path]] = {}
    for name, recipe in RECIPES.items():
        results[name] = [options.directory / f"{recipe}-{seed}" for seed in options.seeds]
        for seed, directory in zip(options.seeds, results[name], strict=True):
            if not (directory / "summary.json").exists():
                _train(recipe, seed, directory, options.validate_every)
    curves = {name: [_curve(directory) for directory in directories] for name, directories in results.items()}
    seeds = ", ".join(map(str, options.seeds))
    learning_curves(PICTURE, curves, "The tiny model learns to write its signs", f"256 held-out prompts, seeds {seeds}")
    print(_table(results))


def _train(recipe: str, seed: int, directory: Path, validate_every: int) -> None:
    changes = [f"seed={seed}", f"schedule.validate_every={validate_every}"]
    run_demo(Path(f"recipes/{recipe}.toml"), directory, changes, Console(width=160), started=datetime.now(UTC))


def _curve(directory: Path) -> Curve:
    """Held-out reward over the samples trained on, from metrics.jsonl."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    trained = {row["step"] + 1: int(row["training/samples"]) for row in rows if row.get("training/samples") is not None}
    points = [(trained.get(row["step"], 0), row["val/reward"]) for row in rows if row.get("val/reward") is not None]
    return Curve([samples for samples, _ in points], [reward for _, reward in points])


def _table(results: dict[str, list[Path]]) -> str:
    lines = [
        "| recipe | seed | before | after | gain (95 %) | edge density | colour entropy | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, directories in results.items():
        lines += [_line(name, json.loads((directory / "summary.json").read_text())) for directory in directories]
    return "\n".join(lines)


def _line(name: str, summary: dict[str, Any]) -> str:
    low, high = summary["bootstrap_ci95"]
    cells: Sequence[str] = [
        name,
        str(summary["seed"]),
        f"{summary['held_out_reward_before']:.3f}",
        f"{summary['held_out_reward_after']:.3f}",
        f"{summary['improvement']:+.3f} ({low:+.3f} … {high:+.3f})",
        f"{_change(summary, 'edge_density'):+.1f} %",
        f"{_change(summary, 'colour_entropy'):+.1f} %",
        f"{summary['training_seconds']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _change(summary: dict[str, Any], name: str) -> float:
    """Of a figure over training, in percent."""
    return 100.0 * (float(summary[f"{name}_after"]) / float(summary[f"{name}_before"]) - 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--validate-every", type=int, default=2, help="steps between validations (2)")
    parser.add_argument("--directory", type=Path, default=Path("runs/learning"))
    return parser


if __name__ == "__main__":
    main()
