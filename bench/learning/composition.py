"""Composition: every algorithm on the small world at equal samples, scored by the judge that training never sees.

    nvidia-cuda-mps-control -d    # runs share a GPU
    python -m bench.learning.composition all --gpus 0,1 --parallel 32 --cores-per-run 1
    python -m bench.learning.composition all --algorithms awm crd --seeds 1 …    some of it
    python -m bench.learning.composition page                                    table and curves of what is there

`all` makes the base and the preferences, sweeps three learning rates of each algorithm with one seed, and trains the
best by its reward with three seeds; `sweep` and `runs` are its halves.

An algorithm's job is the small world's (`recipes/bases/composition_small.toml`) with what the algorithm's own recipe
of signs says under rollout, algorithm and trainer, and half of the steps noisy where a fixed window says how many. The
sweep is validated on `small_validation`, the runs on `small_seen`. Every run makes the same number of pictures, but
`previews` makes half of them once more, in full, and its figures count both; DPO from pairs reads as many from a data
set of the base's own, which took more to make. DiffusionOPD learns from the models that AWM and Flow-GRPO of its seed
left, each of which teaches half of the prompts, and the rewards only watch. ReFL and SRPO follow the gradient of the
reward's smooth score, and the reward watches. Every run has a fresh stack of its own; a run that is there is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console

from bench.learning.jobs import SMOOTHED, as_changes, lacking, own_settings
from bench.learning.results import NONE, Result, changes, curve, gains, link, reached, read_all, spread
from bench.learning.runs import Run, add_options, places, report, train_all
from docs.generate.markdown import rewrite, table
from flowfleet.demo.demos import DEMOS, WIDER, Made
from flowfleet.demo.plots import learning_panels

RECIPE: Final = "bases/composition_small"
PROMPTS: Final = "recipes/composition/prompts"
REWARD: Final = "composition"
JUDGE: Final = "composition_judge"
SCORE: Final = f"val-core/rewards/{JUDGE}/mean"
"""The judge's mean over all held-out prompts, of a validation."""
TARGETS: Final = (0.5, 0.6)
SEEDS: Final = (1, 2, 3)
AGAIN: Final = "start again"
PREFERENCES: Final = "recipes.composition.base.preferences --world small"
SWEEP: Final = "python -m bench.learning.composition sweep"
PAIRS: Final = "preferences/preferences.jsonl"
SAMPLES: Final = 144
"""Samples of a step."""
BATCH: Final = SAMPLES // 2
"""Samples of a batch: a trainer that repeats batches whole has one for each of two updates."""
STEPS, EVERY = 96, 16
"""Steps of a run, and between its validations."""
SWEEP_STEPS, SWEEP_EVERY = 40, 8
FACTORS: Final = (0.5, 1.0, 2.0)
"""The whole sweep: factors of the learning rate of the recipe of signs."""
SWEEP_SEED: Final = 1
DIRECTORY: Final = Path("runs/composition")
PAGE: Final = Path("docs/results.md")
PART: Final = "learning-composition"
PICTURE: Final = "learning_composition.png"


@dataclass(frozen=True)
class Algorithm:
    """A line of the table."""

    title: str
    recipe: str
    """Stem of its recipe of signs."""
    reads_pairs: bool = False
    """Trains on a preference data set, and samples nothing."""
    teachers: tuple[str, ...] = ()
    """Keys of algorithms whose models of the same seed teach it, each an equal share of the prompts."""

    @property
    def key(self) -> str:
        """What its directories begin with."""
        return self.recipe.removeprefix("tiny_")


ALGORITHMS: Final = (
    Algorithm("Flow-GRPO", "tiny_ocr"),
    Algorithm("Flow-GRPO, full", "tiny_ocr_full"),
    Algorithm("Flow-CPS", "tiny_flow_cps"),
    Algorithm("MixGRPO", "tiny_mix_grpo"),
    Algorithm("GRPO-Guard", "tiny_grpo_guard"),
    Algorithm("Flow-DPPO", "tiny_flow_dppo"),
    Algorithm("DanceGRPO", "tiny_dance_grpo"),
    Algorithm("TempFlow-GRPO", "tiny_temp_flow_grpo"),
    Algorithm("GARDO", "tiny_gardo"),
    Algorithm("DiffusionNFT", "tiny_diffusion_nft"),
    Algorithm("DiffusionNFT, full", "tiny_diffusion_nft_full"),
    Algorithm("AWM", "tiny_awm"),
    Algorithm("ELBO-PG", "tiny_elbo_pg"),
    Algorithm("DGPO", "tiny_dgpo"),
    Algorithm("CRD", "tiny_crd"),
    Algorithm("online DPO", "tiny_online_dpo"),
    Algorithm("DPO from pairs", "tiny_dpo", reads_pairs=True),
    Algorithm("previews", "tiny_previews"),
    Algorithm("DiffusionOPD", "tiny_diffusion_opd", teachers=("awm", "ocr")),
    Algorithm("ReFL", "tiny_refl"),
    Algorithm("SRPO", "tiny_srpo"),
)


TEACHERS: Final = frozenset(key for one in ALGORITHMS for key in one.teachers)
"""Keys of algorithms whose runs keep their models."""


def main() -> int:
    options, console = _parser().parse_args(), Console(width=200)
    chosen = [one for one in ALGORITHMS if options.algorithms is None or one.key in options.algorithms]
    listed, where, begun = Listed(options, chosen), places(options), time.monotonic()
    errors: dict[Run, str] = {}
    try:
        if options.what != "page":
            listed(errors)  # refuses settings that make no job, before the base takes minutes
            make_first(options, chosen, console)
            errors = train_all(listed, where, options.budget - (time.monotonic() - begun), console)
    except ValueError as mistake:
        sys.exit(str(mistake))
    seeds = sorted({*SEEDS, *options.seeds})
    factors = {one: best_factor(one, options.directory) for one in chosen}
    for one, factor in factors.items():
        if factor is not None:
            console.print(f"{one.title}: {factor:g} × its learning rate", highlight=False)
    results = read_all(ALGORITHMS, seeds, options.directory, SCORE)
    if results:
        text = page_part(results, {one: swept(one, options.directory) for one in ALGORITHMS})
        if options.page is not None:
            draw(results, options.page.parent / "images" / PICTURE)
            rewrite(options.page, {PART: text})
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif options.what == "page":
        console.print(f"{options.directory} holds no finished run: name another --directory")
    runs = listed.every(errors)
    errors |= {run: f"not started: {lack}" for run in runs if run not in errors and (lack := lacking(run))}
    unswept = [one.key for one, factor in factors.items() if factor is None]
    if options.what in ("runs", "all") and unswept:
        text = f"not started: first run `{SWEEP} --algorithms {' '.join(unswept)} --directory {options.directory}`"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return report(runs, errors, console) or 1
    return report(runs, errors, console)


class Listed:
    """What the command is to train, as far as it is known: an algorithm's runs follow its sweep, and students their
    teachers."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Algorithm]) -> None:
        self._options, self._chosen = options, chosen
        self._ready = set[Run]()

    def every(self, errors: Mapping[Run, str] = MappingProxyType({})) -> list[Run]:
        """Runs that lack something too. `errors`: of runs that failed, and are waited for no longer. ValueError for
        settings that make no job."""
        what, directory = self._options.what, self._options.directory
        runs = sweep(self._chosen, directory) if what in ("sweep", "all") else []
        failed = {run.directory for run in errors}
        pending = {_key(run) for run in runs if not run.is_done and run.directory not in failed}
        if what in ("runs", "all"):
            swept_ones = [one for one in self._chosen if one.key not in pending and swept(one, directory)]
            runs += plan(swept_ones, self._options.seeds, directory)
        given = (base_of(self._options), *self._options.set)
        return [replace(run, changes=(*run.changes, *given), keeps_model=self._keeps_model(run)) for run in runs]

    def _keeps_model(self, run: Run) -> bool:
        is_teacher = _key(run) in TEACHERS and run.directory.parent.name != "sweep"
        return is_teacher or bool(self._options.keep_models)

    def __call__(self, errors: Mapping[Run, str]) -> list[Run]:
        runs = self.every(errors)
        self._ready |= {run for run in runs if run not in self._ready and not lacking(run)}
        return [run for run in runs if run in self._ready]


def _key(run: Run) -> str:
    return run.directory.name.rpartition("-")[0]


def make_first(options: argparse.Namespace, chosen: Sequence[Algorithm], console: Console) -> None:
    """Makes the base and the preferences where they are missing and wanted. ValueError where that fails, and where no
    GPU is given for it."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if any(one.startswith("model.path=") for one in options.set):
        raise ValueError("--set model.path: name the base by --model")
    if WIDER.path == options.model:
        if not (options.gpus or WIDER.path.exists()):
            raise ValueError("the base is made on a GPU: give --gpus 0, or --model recipes/composition/model")
        replace(WIDER, or_else=AGAIN).make(say)
    if any(one.reads_pairs for one in chosen):
        pairs = (options.directory / PAIRS).parent
        command = f"{PREFERENCES} --model {options.model} --pairs {STEPS * SAMPLES // 2}"
        Made(pairs, command, "the preferences", AGAIN).make(say)


def sweep(algorithms: Sequence[Algorithm], directory: Path) -> list[Run]:
    """Every algorithm with each of `FACTORS`, validated on prompts that no figure is of."""
    runs = [
        run_of(one, factor, SWEEP_SEED, directory / "sweep" / f"{one.key}-{factor:g}", "small_validation", directory)
        for factor in FACTORS
        for one in algorithms
    ]
    return [replace(run, changes=(*run.changes, *lasting(SWEEP_STEPS, SWEEP_EVERY))) for run in runs]


def lasting(steps: int, every: int) -> tuple[str, str]:
    """Settings of a job's length, and of the steps between its validations."""
    return f"schedule.steps={steps}", f"schedule.validate_every={every}"


def plan(algorithms: Sequence[Algorithm], seeds: Sequence[int], directory: Path) -> list[Run]:
    """Every algorithm at its best learning rate, seed after seed, so that an early end leaves whole seeds. ValueError
    where the sweep has none of an algorithm."""
    factors = chosen_factors(algorithms, directory)
    runs = [
        run_of(one, factor, seed, directory / f"{one.key}-{seed}", "small_seen", directory)
        for seed in seeds
        for one, factor in factors.items()
    ]
    return [replace(run, changes=(*run.changes, *lasting(STEPS, EVERY))) for run in runs]


def chosen_factors(algorithms: Sequence[Algorithm], directory: Path) -> dict[Algorithm, float]:
    """`best_factor` of each. ValueError where the sweep has none of an algorithm."""
    factors = {one: best_factor(one, directory) for one in algorithms}
    if missing := [one.key for one, factor in factors.items() if factor is None]:
        raise ValueError(
            f"{directory} has no finished sweep of {len(missing)} algorithms: first run `{SWEEP} --algorithms "
            f"{' '.join(missing)} --directory {directory}`"
        )
    return {one: factor for one, factor in factors.items() if factor is not None}


def best_factor(one: Algorithm, directory: Path) -> float | None:
    """The factor whose run has the greatest reward in the end; the judge has no say in it. None without runs."""
    found = swept(one, directory)
    return max(found, key=lambda factor: found[factor]) if found else None


def swept(one: Algorithm, directory: Path) -> dict[float, float]:
    """Factor of the learning rate → reward on `small_validation` in the end, of the factors that ran."""
    files = {factor: directory / "sweep" / f"{one.key}-{factor:g}" / "summary.json" for factor in FACTORS}
    return {factor: reward_after(json.loads(file.read_text())) for factor, file in files.items() if file.exists()}


def page_part(results: Mapping[Algorithm, Sequence[Result]], sweeps: Mapping[Algorithm, Mapping[float, float]]) -> str:
    """The picture, the table, and what the sweep came to."""
    shown = f"![The judge's score of each algorithm over the pictures that it generated](images/{PICTURE})"
    header = (
        *("algorithm", "settings of", "seeds", "learning rate"),
        *("judge before", "after", "gain", "at least", "highest on the way", "reward after"),
        *(f"pictures to {target}" for target in TARGETS),
        *(f"seconds to {TARGETS[0]}", "edges", "colors"),
    )
    runs = table(header, [_row(one, runs) for one, runs in results.items()])
    rates = table(
        ("algorithm", *(f"reward at {factor:g} × the learning rate" for factor in FACTORS)),
        [
            (one.title, *(f"{found[factor]:.3f}" if factor in found else NONE for factor in FACTORS))
            for one, found in sweeps.items()
            if found
        ],
    )
    return f"{shown}\n\n{runs}\n\n{rates}"


def draw(results: Mapping[Algorithm, Sequence[Result]], path: Path) -> None:
    """A panel an algorithm."""
    panels = {one.title: [curve(run) for run in runs] for one, runs in results.items()}
    about = f"Each line is a seed; dotted: {TARGETS[0]}; the judge is one that training never sees"
    title = "How well each algorithm teaches composition"
    learning_panels(path, panels, (), title, about, "pictures generated", TARGETS[0], y_label="the judge's mean score")


def _row(one: Algorithm, runs: Sequence[Result]) -> list[str]:
    rates = {run.settings["trainer"]["optimizer"]["lr"] for run in runs}
    return [
        one.title,
        link(one.recipe),
        str(len(runs)),
        ", ".join(f"{rate:.1e}" for rate in sorted(rates)) or NONE,
        *judged(runs),
        spread([max(point.reward for point in run.points) for run in runs], ".3f"),
        spread([reward_after(run.summary) for run in runs], ".3f"),
        *(reached([run.first_at(target, lambda point: point.generated) for run in runs]) for target in TARGETS),
        reached([run.first_at(TARGETS[0], lambda point: point.seconds) for run in runs]),
        *changes(runs),
    ]


def reward_after(summary: Mapping[str, Any]) -> float:
    """The reward's score in the end, also where it watched."""
    watched = summary.get("watched", {})
    after: float = watched[REWARD]["after"] if REWARD in watched else summary["held_out_reward_after"]
    return after


def judged(runs: Sequence[Result]) -> list[str]:
    """Cells of the judge's score before and after, its gain, and the least that this is."""
    scores = [run.summary["watched"][JUDGE] for run in runs]
    return gains(
        [score["before"] for score in scores],
        [score["after"] for score in scores],
        [score["bootstrap_ci95"][0] for score in scores],
    )


def run_of(one: Algorithm, factor: float, seed: int, directory: Path, held_out: str, others: Path = DIRECTORY) -> Run:
    """`others`: folder of the runs and of the preferences that it may learn from."""
    settings = own_settings(tomllib.loads(Path(f"recipes/{one.recipe}.toml").read_text()))
    rate = settings.pop("trainer.optimizer.lr") * factor
    settings |= {"name": f"composition-{one.key}".replace("_", "-"), "trainer.optimizer.lr": rate}
    settings |= {"rollout.batch_size": BATCH, "trainer.micro_batch_size": BATCH}
    settings |= _data(one, seed, f"{PROMPTS}/{held_out}.jsonl", others.absolute())
    return Run(RECIPE, seed, directory, as_changes(settings), rewards=(*DEMOS["composition"].rewards, SMOOTHED))


def _data(one: Algorithm, seed: int, held_out: str, others: Path) -> dict[str, Any]:
    """Settings of what it learns from, `SAMPLES` of them a step."""
    if one.reads_pairs:
        pairs = {"data.train": str(others / PAIRS), "data.validation": held_out}
        return {**pairs, "rollout.group_size": 2, "rollout.prompts_per_step": SAMPLES // 2}
    if not one.teachers:
        return {"data.validation": held_out}
    sources = [{"name": key, "path": f"{PROMPTS}/small_train.jsonl"} for key in one.teachers]
    sources[0]["validation"] = held_out
    taught = {key: {"adapter": str(others / f"{key}-{seed}" / "model"), "sources": [key]} for key in one.teachers}
    parts = {"data": {"sources": sources}, "algorithm.teachers": taught}
    return {**parts, "rollout.group_size": 1, "rollout.prompts_per_step": SAMPLES}


def add_base(parser: argparse.ArgumentParser) -> None:
    """The model that all runs begin with, `model`."""
    about = "folder of the base; without it, the demo's for GPUs, which is made where it is missing"
    parser.add_argument("--model", type=Path, default=WIDER.path, help=about)


def base_of(options: argparse.Namespace) -> str:
    """The base as a setting of every job."""
    return f"model.path={options.model.absolute()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.composition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("all", "sweep", "runs", "page"))
    keys = [one.key for one in ALGORITHMS]
    parser.add_argument("--algorithms", nargs="+", choices=keys, metavar="NAME", help=f"to train, of {', '.join(keys)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    add_options(parser)
    add_base(parser)
    parser.add_argument("--keep-models", action="store_true", help="in each run's folder, as `model`")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument("--page", type=Path, default=PAGE, help="rewritten, with its picture (docs/results.md)")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="print alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
