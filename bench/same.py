"""Checks that a faster way to compute learns the same: recipes in several ways at equal samples, paired by seed.

    python -m bench.same [--recipes tiny_ocr] [--ways plain only idle fp8 merged flash] [--seeds 1 2 3] [--parallel 1]
    python -m bench.same --recipes tiny_ocr_full --ways plain "fp8 update"
    python -m bench.same --recipes tiny_ocr tiny_awm tiny_crd --ways recipe    what each recipe learns, unchanged

A run is `flowfleet demo --recipe RECIPE` on a stack of its own; runs at once have cores of their own. It leaves its
summary, curve, pictures and model in DIRECTORY/WAY/RECIPE-SEED, and one that is there is kept. Every way but `recipe`
trains in bfloat16 without `trainer.deterministic`. Tiny models have no linears that are worth float8, so the smallest
size is lowered (`FLOWFLEET_FP8_MIN_SIZE`) in every process. The table has the held-out reward before and after training
as mean (least … greatest) over seeds, its difference to `plain`, and the gain in reward per 100 s of training.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench import report
from flowfleet.process.service import end_with_parent

PLAIN = "plain"
COMMON = ("model.dtype=bfloat16", "trainer.deterministic=false", "schedule.validate_every=3")
WAYS: dict[str, tuple[str, ...]] = {
    PLAIN: COMMON,
    "only": (*COMMON, "trainer.samples=only"),
    "idle": (*COMMON, "trainer.samples=idle"),
    "fp8": (*COMMON, "model.base=fp8"),
    "merged": (*COMMON, "rollout.adapter=merged"),
    "flash": (*COMMON, "rollout.tail_steps=2"),
}
"""Changes of each way to a recipe that trains an adapter."""
OTHERS: dict[str, tuple[str, ...]] = {"fp8 update": (*COMMON, "trainer.quantization=fp8"), "recipe": ()}
"""A way of full training, and the recipe as it is."""
MIN_SIZE = "64"
ALLOWED = 0.02
"""Largest difference of the means that counts as the same."""
LIMIT_S = 3600.0
"""A run that takes longer hangs, and is ended."""
TAIL = 3000

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A training: a recipe in one way with one seed. `changes` come after those of the way."""

    recipe: str
    way: str
    seed: int
    folder: Path
    changes: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        return self.folder / self.way / f"{self.recipe}-{self.seed}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (*(WAYS | OTHERS)[self.way], *self.changes)

    @property
    def summary(self) -> Summary | None:
        """The summary of a finished run."""
        path = self.directory / "summary.json"
        return dict(json.loads(path.read_text())) if path.exists() else None


def main() -> int:
    flags = report.parser("same", __doc__)
    flags.add_argument("--recipes", nargs="+", default=["tiny_ocr"])
    flags.add_argument("--ways", nargs="+", choices=[*WAYS, *OTHERS], default=[*WAYS])
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--parallel", type=int, default=1, help="runs at once, each with its share of the cores (1)")
    flags.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job; repeatable")
    flags.add_argument("--directory", type=Path, default=Path("runs/same"))
    options = flags.parse_args()
    os.environ["FLOWFLEET_FP8_MIN_SIZE"] = MIN_SIZE
    runs = [  # seed after seed, so that an early end leaves whole pairs
        Run(recipe, way, seed, options.directory, tuple(options.set))
        for seed in options.seeds
        for recipe in options.recipes
        for way in options.ways
    ]
    errors = train(runs, options.parallel)
    rows = compared({run: summary for run in runs if (summary := run.summary) is not None})
    report.finish("same", options, rows, [*rows[0]] if rows else [])
    for run, error in errors.items():
        print(f"{run.directory}: {error}", file=sys.stderr)
    return 1 if errors else 0


def train(runs: Sequence[Run], parallel: int) -> dict[Run, str]:
    """Trains the runs that are not done, in this order; returns the errors of those that failed."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= parallel <= len(cores):
        sys.exit(f"--parallel {parallel}: give 1 to {len(cores)}, the cores of this machine")
    share, free = len(cores) // parallel, SimpleQueue[list[int]]()
    for number in range(parallel):
        free.put(cores[number * share : (number + 1) * share])

    def one(run: Run) -> str | None:
        place = free.get()
        try:
            return _train(run, place)
        finally:
            free.put(place)

    todo = [run for run in runs if run.summary is None]
    with ThreadPoolExecutor(parallel) as pool:
        return {run: error for run, error in zip(todo, pool.map(one, todo), strict=True) if error}


def _train(run: Run, cores: Sequence[int]) -> str | None:
    """Returns the error, if there was one. The stack's files go; figures, pictures and the model stay."""
    argv = [sys.executable, "-m", "flowfleet.cli", "demo", "--recipe", run.recipe, "--seed", str(run.seed)]
    argv += ["--state-dir", str(run.directory), *(part for it in run.settings for part in ("--set", it))]

    def prepare() -> None:
        end_with_parent()
        os.sched_setaffinity(0, cores)

    run.directory.parent.mkdir(parents=True, exist_ok=True)
    log, env = run.directory.with_name(f"{run.directory.name}.log"), {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=prepare)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"not done after {LIMIT_S:.0f} s; its output is in {log}"
    if code or run.summary is None:
        return f"exit status {code}; the end of {log}:\n{log.read_text(errors='replace')[-TAIL:]}"
    shutil.rmtree(run.directory / "stack", ignore_errors=True)
    print(f"{run.directory} is done", flush=True)
    return None


def compared(found: Mapping[Run, Summary]) -> list[dict[str, Any]]:
    """Returns a row for each recipe and way; differences are over the seeds that `plain` has too."""
    after = {(run.recipe, run.way, run.seed): float(it["held_out_reward_after"]) for run, it in found.items()}
    rows = []
    for recipe, way in dict.fromkeys((run.recipe, run.way) for run in found):
        runs = {run.seed: it for run, it in found.items() if (run.recipe, run.way) == (recipe, way)}
        shared = [seed for seed in runs if way != PLAIN and (recipe, PLAIN, seed) in after]
        pairs = [after[recipe, way, seed] - after[recipe, PLAIN, seed] for seed in shared]
        row: dict[str, Any] = {"recipe": recipe, "way": way, "seeds": [*runs]}
        row |= {name: spread([it[f"held_out_reward_{name}"] for it in runs.values()]) for name in ("before", "after")}
        row |= {"difference": spread(pairs, "+.3f")}
        row |= {"is_same": abs(statistics.fmean(pairs)) <= ALLOWED if pairs else None}
        rates = [100 * it["improvement"] / it["training_seconds"] for it in runs.values()]
        rows.append(row | {"gain_per_100_s": spread(rates, "+.3f")})
    return rows


def spread(values: Sequence[float], form: str = ".3f") -> str | None:
    """Mean (least … greatest)."""
    if not values:
        return None
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} … {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
