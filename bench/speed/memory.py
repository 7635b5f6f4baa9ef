"""How far is the memory that `flowfleet plan` predicts from what was measured?

    python -m bench.speed.memory [--results bench/results]

Predicts the peak of each row of bench/results that measured one (`train`, `loop`, `rollout`), from the
row's own settings, and writes memory.json next to them for docs/results.md. Needs no GPU; some 10 s of CPU time a
row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.performance import RESULTS, read_all
from bench.speed import rollout, train
from bench.speed.full_size import write_checkpoint
from bench.speed.loop import __main__ as loop
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.planning.memory import GIB
from flowfleet.planning.plan import predict

NAME = "memory"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch) / "model")
        figures = [*compared(read_all(options.results), model)]
    (options.results / f"{NAME}.json").write_text(json.dumps({"figures": figures}, indent=1) + "\n")
    for row in figures:
        print(f"{row['row']:16} {row['of']:8} measured {row['measured']:6.1f} predicted {row['predicted']:6.1f} GiB")
    return 0


def compared(rows: Mapping[str, Mapping[str, Any]], model: Path) -> Iterator[dict[str, Any]]:
    """Row, process, measured and predicted GiB of everything that has a peak."""
    for name, row in rows.items():
        for figure in row["figures"]:
            if figure.get("bench") == "loop":
                spec = parse_job(loop.job(argparse.Namespace(**figure["settings"]), model))
                measured = figure["services"]["others"]["perf/peak_memory_gib"]
                yield _row(name, "trainer", measured, predict(spec).trainer.peak)
            elif figure.get("row") == "service" and figure["engine"] == "diffusers":
                yield _row(name, "rollout", figure["peak_gib"], predict(_replica(figure, model)).rollout.peak)
            elif "ms_per_row" in figure:
                spec = train.bench_job(model, argparse.Namespace(**figure), figure["world_size"])
                peak = predict(spec, text_tokens=figure["text"]).trainer.peak
                yield _row(name, "trainer", figure["peak_gib"], peak)


def _row(name: str, of: str, measured: float, predicted: float) -> dict[str, Any]:
    return {"row": name, "of": of, "measured": measured, "predicted": round(predicted / GIB, 2)}


def _replica(figure: Mapping[str, Any], model: Path) -> JobSpec:
    """The job whose rollout bench.speed.rollout's replica was."""
    adapter = (
        {"rank": figure["lora_rank"]} if figure["lora_rank"] else {"rank": 1, "target_modules": [rollout.ONE_LINEAR]}
    )
    return parse_job(
        {
            "model": {"path": str(model), "load_format": "dummy"},
            "data": {"train": "unused.txt"},
            "rewards": {"ocr": {}},
            "rollout": {
                "height": figure["size"],
                "width": figure["size"],
                "num_inference_steps": figure["steps"],
                "guidance_scale": figure["guidance"],
                "batch_size": figure["batch"],
                "quantization": figure["quantization"],
            },
            "trainer": {"mode": "lora", "lora": adapter},
        }
    )


if __name__ == "__main__":
    sys.exit(main())
