"""Does a faster way to compute learn the same? A recipe in several ways at equal samples, paired by seed.

    python -m bench.learning.same [--ways plain only idle fp8 merged flash] [--seeds 1 2 3] [--parallel 1]
    python -m bench.learning.same --recipe tiny_ocr_full --ways plain "fp8 update"
    python -m bench.learning.same --table-only --page docs/results.md
    python -m bench.learning.same --recipe NAME [--reward REWARD …] [--set KEY=VALUE …] [--gpus 0]

Every way trains in bfloat16 without `trainer.deterministic`, as `plain` does. Tiny models have no linears that float8
is worth: for both kinds the smallest is lowered (`FLOWFLEET_FP8_MIN_SIZE`), in every process alike. Runs go into
DIRECTORY/<way>/<recipe>-<seed>; a run that is there is kept. The table holds the held-out reward after training, its
difference to `plain`, and reward per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.learning.results import Result, read_result, spread
from bench.learning.runs import Run, add_options, places, report, train_all
from docs.generate.markdown import content, rewrite, table

PLAIN = "plain"
WAYS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "only": ("trainer.samples=only",),
    "idle": ("trainer.samples=idle",),
    "fp8": ("model.base=fp8",),
    "merged": ("rollout.adapter=merged",),
    "flash": ("rollout.tail_steps=2",),
}
"""What each way changes in a recipe that trains an adapter."""
FULL_WAYS: dict[str, tuple[str, ...]] = {"fp8 update": ("trainer.quantization=fp8",)}
"""In one that trains all weights."""
COMMON = ("model.dtype=bfloat16", "trainer.deterministic=false", "schedule.validate_every=3")
MIN_SIZE = "64"
RECIPE = "tiny_ocr"
PART = "learning-same"
"""Part of the page; that of another recipe ends in its name."""
ALLOWED = 0.02
"""Largest difference of the means that counts as the same."""


def main() -> int:
    options, console = _parser().parse_args(), Console(width=200)
    part = PART if options.recipe == RECIPE else f"{PART}-{options.recipe}"
    if options.page is not None:
        try:
            content(options.page.read_text(), part)
        except (ValueError, OSError) as mistake:
            sys.exit(str(mistake))
    os.environ["FLOWFLEET_FP8_MIN_SIZE"] = MIN_SIZE
    runs = plan(options.recipe, options.ways, options.seeds, options.directory)
    runs = [replace(run, changes=(*run.changes, *options.set), rewards=tuple(options.reward)) for run in runs]
    errors = {} if options.table_only else train_all(lambda _: runs, places(options), options.budget, console)
    found = read(options.recipe, options.ways, options.seeds, options.directory)
    console.print(same_table(found), markup=False, highlight=False, soft_wrap=True)
    if options.page is not None:
        rewrite(options.page, {part: same_table(found)})
    return report(runs, errors, console)


def plan(recipe: str, ways: Sequence[str], seeds: Sequence[int], directory: Path) -> list[Run]:
    """All runs, seed after seed, so that an early end leaves whole pairs."""
    return [
        Run(recipe, seed, directory / way / f"{recipe}-{seed}", (*COMMON, *(WAYS | FULL_WAYS)[way]))
        for seed in seeds
        for way in ways
    ]


def read(recipe: str, ways: Sequence[str], seeds: Sequence[int], directory: Path) -> dict[str, dict[int, Result]]:
    """The finished runs by way and seed."""
    found: dict[str, dict[int, Result]] = {}
    for run in plan(recipe, ways, seeds, directory):
        if run.is_done:
            found.setdefault(run.directory.parent.name, {})[run.seed] = read_result(run.directory)
    return found


def same_table(found: Mapping[str, Mapping[int, Result]]) -> str:
    """A line a way; differences are of the seeds that `plain` has too."""
    return table(
        ("way", "seeds", "after", "difference to plain", "the same", "gain per 100 s of training"),
        [_line(way, results, found.get(PLAIN, {})) for way, results in found.items()],
    )


def _line(way: str, results: Mapping[int, Result], plain: Mapping[int, Result]) -> list[str]:
    after = {seed: result.summary["held_out_reward_after"] for seed, result in results.items()}
    pairs = [after[seed] - plain[seed].summary["held_out_reward_after"] for seed in after if seed in plain]
    rates = [100 * it.summary["improvement"] / it.summary["training_seconds"] for it in results.values()]
    return [
        way,
        str(len(after)),
        spread(list(after.values()), ".3f"),
        spread(pairs, "+.3f") if pairs and way != PLAIN else "–",
        ("yes" if abs(statistics.fmean(pairs)) <= ALLOWED else "no") if pairs and way != PLAIN else "–",
        spread(rates, "+.3f"),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.same", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument(
        "--ways", nargs="+", choices=[*WAYS, *FULL_WAYS], default=[*WAYS], help="the last: of full training"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_options(parser)
    parser.add_argument("--reward", action="append", default=[], help="as `flowfleet up` takes it; repeatable")
    parser.add_argument("--directory", type=Path, default=Path("runs/same"))
    parser.add_argument("--table-only", action="store_true", help="train nothing")
    parser.add_argument("--page", type=Path, help="whose part is rewritten, as docs/results.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
