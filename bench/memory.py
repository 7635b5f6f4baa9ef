"""Compares the memory that `flowfleet plan` predicts with what was measured.

    python -m bench.memory [--results bench/results]

It predicts the peak of each row of those files that measured one (`train`, `loop`, `rollout`) from the row's own
settings. It needs no GPU and takes some 10 s of CPU time per row.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import loop, report, rollout, train
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.planning.memory import GIB
from flowfleet.planning.plan import predict
from recipes.full_size.make_model import write_checkpoint


def main() -> int:
    parser = report.parser("memory", __doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch) / "model")
        files = {path.stem: json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))}
        rows = [*compared(files, model)]
    report.finish("memory", options, rows, ["row", "of", "measured", "predicted"])
    return 0


def compared(rows: Mapping[str, Mapping[str, Any]], model: Path) -> Iterator[dict[str, Any]]:
    """Yields measured and predicted GiB of each process that has a peak."""
    for name, row in rows.items():
        for figure in row.get("figures", ()):
            if figure.get("bench") == "loop":
                spec = parse_job(loop.job(_options(loop.flags(), figure["settings"]), model))
                measured = figure["services"]["others"]["perf/peak_memory_gib"]
                yield _row(name, "trainer", measured, predict(spec).trainer.peak)
            elif figure.get("row") == "service" and figure["engine"] == "diffusers":
                yield _row(name, "rollout", figure["peak_gib"], predict(_replica(figure, model)).rollout.peak)
            elif "ms_per_row" in figure:
                spec = train.bench_job(model, _options(train.flags(), figure), figure["world_size"])
                peak = predict(spec, text_tokens=figure["text"]).trainer.peak
                yield _row(name, "trainer", figure["peak_gib"], peak)


def _options(flags: argparse.ArgumentParser, given: Mapping[str, Any]) -> argparse.Namespace:
    """Options of a script that were given, and the defaults of others: an older file has fewer."""
    return argparse.Namespace(**{**vars(flags.parse_args([])), **given})


def _row(name: str, of: str, measured: float, predicted: float) -> dict[str, Any]:
    return {"row": name, "of": of, "measured": measured, "predicted": round(predicted / GIB, 2)}


def _replica(figure: Mapping[str, Any], model: Path) -> JobSpec:
    """The job of a replica that `bench.rollout` measured."""
    adapter = (
        {"rank": figure["lora_rank"]} if figure["lora_rank"] else {"rank": 1, "target_modules": [rollout.ONE_LINEAR]}
    )
    is_base = figure["quantization"] == "fp8_base"
    return parse_job(
        {
            "model": {"path": str(model), "load_format": "dummy", "base": "fp8" if is_base else "plain"},
            "data": {"train": "unused.txt"},
            "rewards": {"ocr": {}},
            "rollout": {
                "height": figure["size"],
                "width": figure["size"],
                "num_inference_steps": figure["steps"],
                "guidance_scale": figure["guidance"],
                "batch_size": figure["batch"],
                "quantization": "none" if is_base else figure["quantization"],
            },
            "trainer": {"mode": "lora", "lora": adapter},
        }
    )


if __name__ == "__main__":
    sys.exit(main())
