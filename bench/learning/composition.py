"""Composition: every algorithm on the small world at equal samples, scored by the judge that training never sees.

    nvidia-cuda-mps-control -d    # runs share a GPU, at most 17
    python -m bench.learning.composition train --gpus 0,1 --parallel 34 --cores-per-run 1
    python -m bench.learning.composition train --algorithms awm crd --seeds 1 …    some of it
    python -m bench.learning.composition page                                      table and curves of what is there

`train` makes the base and the preferences. Each algorithm trains with three learning rates and the first seed, and with
the other seeds at the rate whose reward was the greatest in the last steps of training; for DPO from pairs, which
samples nothing, in the last validation.

An algorithm's job is the small world's (`recipes/bases/composition_small.toml`) with what the algorithm's own recipe
of signs says under rollout, algorithm and trainer, and half of the steps noisy where a fixed window says how many. It
is validated on `small_seen`. Every run makes the same number of pictures. Previews make half of theirs once more, in
full, and their figures count both; DPO from pairs reads as many from a data set of the base's own, which took more to
make. DiffusionOPD learns from the models that AWM and Flow-GRPO of its seed left, each of which teaches half of the
prompts, while the rewards only watch. ReFL and SRPO follow the gradient of the reward's smooth score, and the reward
watches. Each run starts a stack of its own; runs on a GPU share the rewards. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console

from bench.learning.jobs import SMOOTHED, as_changes, lacking, own_settings
from bench.learning.results import NONE, Result, changes, curve, gains, link, reached, read_result, spread
from bench.learning.runs import Run, add_options, places, report, train_all
from bench.learning.shared import shared_rewards
from docs.generate.markdown import rewrite, table
from flowfleet.demo.demos import DEMOS, WIDER, Made
from flowfleet.demo.plots import learning_panels

RECIPE: Final = "bases/composition_small"
PROMPTS: Final = "recipes/composition/prompts"
HELD_OUT: Final = f"{PROMPTS}/small_seen.jsonl"
REWARD: Final = "composition"
JUDGE: Final = "composition_judge"
SCORE: Final = f"val-core/rewards/{JUDGE}/mean"
"""The judge's mean over all held-out prompts, of a validation."""
TRAINED: Final = f"critic/rewards/{REWARD}/mean"
"""The reward's mean over the pictures of a step."""
TARGETS: Final = (0.4, 0.5)
SEEDS: Final = (1, 2, 3)
FIRST_SEED: Final = SEEDS[0]
AGAIN: Final = "start again"
PREFERENCES: Final = "recipes.composition.base.preferences --world small"
TRAIN: Final = "python -m bench.learning.composition train"
PAIRS: Final = "preferences/preferences.jsonl"
SAMPLES: Final = 144
"""Samples of a step."""
BATCH: Final = SAMPLES // 2
"""Samples of a batch: a trainer that repeats batches whole has one for each of two updates."""
STEPS, EVERY = 96, 16
"""Steps of a run, and between its validations."""
FACTORS: Final = (0.5, 1.0, 2.0)
"""Tried with the first seed: factors of the learning rate of the recipe of signs."""
REWARDS: Final = (*DEMOS["composition"].rewards, SMOOTHED)
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
    listed, errors = Listed(options, chosen), dict[Run, str]()
    if options.what == "train":
        where, begun = places(options), time.monotonic()
        try:
            for run in listed.every():
                listed.lacking(run)  # refuses settings that make no job, before the base takes minutes
            make_first(options, chosen, console)
            with shared_rewards(where, REWARDS) as sharing:
                errors = train_all(listed, sharing, options.budget - (time.monotonic() - begun), console)
        except ValueError as mistake:
            sys.exit(str(mistake))
    results = read_best(options.seeds, options.directory)
    if results:
        text = page_part(results, {one: tried(one, options.directory) for one in ALGORITHMS})
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if options.what == "page":
        if not results:
            sys.exit(f"{options.directory} holds no finished run: name another --directory")
        if options.page is not None:
            draw(results, options.page.parent / "images" / PICTURE)
            rewrite(options.page, {PART: text})
        return 0
    runs = listed.every(errors)
    errors |= {run: f"not started: {lack}" for run in runs if run not in errors and (lack := listed.lacking(run))}
    return report(runs, errors, console)


class Listed:
    """What the command is to train, as far as it is known: an algorithm's other seeds follow its first one with every
    learning rate, and students follow their teachers. Teachers come first because students wait for them."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Algorithm]) -> None:
        self._options = options
        self._chosen = sorted(chosen, key=lambda one: (one.key not in TEACHERS, not one.teachers))
        self._ready = set[Run]()

    def every(self, errors: Mapping[Run, str] = MappingProxyType({})) -> list[Run]:
        """Runs that lack something too. `errors`: of runs that failed, and are waited for no longer. ValueError for
        settings that make no job."""
        directory, failed = self._options.directory, {run.directory for run in errors}
        seeds = dict.fromkeys(seed for seed in self._options.seeds if seed != FIRST_SEED)
        runs = list[Run]()
        for one in self._chosen:
            first = tries(one, directory)
            runs += first
            factor = best_factor(one, directory)
            if factor is not None and all(run.is_done or run.directory in failed for run in first):
                runs += [run_at(one, factor, seed, directory) for seed in seeds]
        given = (base_of(self._options), *self._options.set)
        keeps = bool(self._options.keep_models)
        return [
            replace(run, changes=(*run.changes, *given), keeps_model=keeps or key_of(run) in TEACHERS) for run in runs
        ]

    def __call__(self, errors: Mapping[Run, str]) -> list[Run]:
        runs = self.every(errors)
        self._ready |= {run for run in runs if run not in self._ready and not self.lacking(run)}
        return [run for run in runs if run in self._ready]

    def lacking(self, run: Run) -> str:
        """What a run has to wait for, with the command that makes it; empty where nothing is missing."""
        late = [one for one in algorithm_of(key_of(run)).teachers if not self._has_best(one)]
        lack = lacking(run)
        if lack or run.is_done or not late:
            return lack
        command = f"`{TRAIN} --algorithms {' '.join(late)} --seeds {FIRST_SEED} --directory {self._options.directory}`"
        return f"not every learning rate of its teachers {' and '.join(late)} is tried: first run {command}"

    def _has_best(self, teacher: str) -> bool:
        """Whether its best learning rate cannot change any more."""
        return all(run.is_done for run in tries(algorithm_of(teacher), self._options.directory))


def algorithm_of(key: str) -> Algorithm:
    return next(one for one in ALGORITHMS if one.key == key)


def place_of(one: Algorithm, factor: float, seed: int, directory: Path) -> Path:
    """Folder of a run's results."""
    return directory / f"{one.key}-{factor:g}-{seed}"


def key_of(run: Run) -> str:
    """Key of the algorithm that a run trains."""
    return run.directory.name.rsplit("-", 2)[0]


def saying(console: Console) -> Callable[[str], None]:
    """Prints a log's lines as they are."""
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def make_first(options: argparse.Namespace, chosen: Sequence[Algorithm], console: Console) -> None:
    """Makes the base and the preferences where they are missing and wanted. ValueError where that fails, and where no
    GPU is given for it."""
    say = saying(console)
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


def tries(one: Algorithm, directory: Path) -> list[Run]:
    """An algorithm with each of `FACTORS` and the first seed."""
    return [run_at(one, factor, FIRST_SEED, directory) for factor in FACTORS]


def run_at(one: Algorithm, factor: float, seed: int, directory: Path) -> Run:
    """An algorithm at so many times its recipe's learning rate."""
    run = run_of(one, factor, seed, place_of(one, factor, seed, directory), directory)
    return replace(run, changes=(*run.changes, *lasting(STEPS, EVERY)))


def lasting(steps: int, every: int) -> tuple[str, str]:
    """Settings of a job's length, and of the steps between its validations."""
    return f"schedule.steps={steps}", f"schedule.validate_every={every}"


def chosen_factors(algorithms: Sequence[Algorithm], directory: Path) -> dict[Algorithm, float]:
    """`best_factor` of each. ValueError where none of an algorithm's was tried."""
    factors = {one: best_factor(one, directory) for one in algorithms}
    if missing := [one.key for one, factor in factors.items() if factor is None]:
        raise ValueError(
            f"{directory} has no finished run of {len(missing)} algorithms: first run `{TRAIN} --algorithms "
            f"{' '.join(missing)} --seeds {FIRST_SEED} --directory {directory}`"
        )
    return {one: factor for one, factor in factors.items() if factor is not None}


def best_factor(one: Algorithm, directory: Path) -> float | None:
    """The factor with the greatest reward in the end; neither the judge nor the held-out prompts have a say in it, but
    for DPO from pairs. None without runs."""
    found = tried(one, directory)
    return max(found, key=lambda factor: found[factor]) if found else None


def tried(one: Algorithm, directory: Path) -> dict[float, float]:
    """Factor of the learning rate → reward in the end, of the first seed's runs that are there."""
    places = {factor: place_of(one, factor, FIRST_SEED, directory) for factor in FACTORS}
    return {factor: trained_reward(place) for factor, place in places.items() if (place / "summary.json").exists()}


def trained_reward(place: Path) -> float:
    """Mean reward of the last `EVERY` steps' pictures; of a run without, that of its last validation."""
    rows = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    means = {row["step"]: row[TRAINED] for row in rows if row.get(TRAINED) is not None}
    if not means:
        return reward_after(json.loads((place / "summary.json").read_text()))
    return statistics.fmean(means[step] for step in sorted(means)[-EVERY:])


def read_best(seeds: Sequence[int], directory: Path) -> dict[Algorithm, list[Result]]:
    """The finished runs at each algorithm's best learning rate; algorithms without any are left out."""
    found = {}
    for one in ALGORITHMS:
        if (factor := best_factor(one, directory)) is not None:
            paths = [place_of(one, factor, seed, directory) for seed in sorted({*SEEDS, *seeds})]
            found[one] = [read_result(path, SCORE) for path in paths if (path / "summary.json").exists()]
    return found


def page_part(results: Mapping[Algorithm, Sequence[Result]], rewards: Mapping[Algorithm, Mapping[float, float]]) -> str:
    """The picture, the table, and the rewards by learning rate."""
    shown = f"![The judge's score of each algorithm over the pictures that it generated](images/{PICTURE})"
    header = (
        *("algorithm", "settings of", "seeds", "learning rate, of so many tried"),
        *("judge before", "after", "gain", "at least", "highest on the way", "reward after"),
        *(f"pictures to {target}" for target in TARGETS),
        *(f"seconds to {TARGETS[0]}", "edges", "colors"),
    )
    runs = table(header, [_row(one, runs, len(rewards[one])) for one, runs in results.items()])
    rates = table(
        ("reward in training's last steps", *(f"at {factor:g} × the recipe's learning rate" for factor in FACTORS)),
        [
            (one.title, *(f"{found[factor]:.3f}" if factor in found else NONE for factor in FACTORS))
            for one, found in rewards.items()
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


def _row(one: Algorithm, runs: Sequence[Result], num_rates: int) -> list[str]:
    rates = {run.settings["trainer"]["optimizer"]["lr"] for run in runs}
    return [
        one.title,
        link(one.recipe),
        str(len(runs)),
        f"{', '.join(f'{rate:.1e}' for rate in sorted(rates)) or NONE}, of {num_rates}",
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


def run_of(one: Algorithm, factor: float, seed: int, directory: Path, others: Path) -> Run:
    """`others`: folder of the runs and of the preferences that it may learn from."""
    settings = own_settings(tomllib.loads(Path(f"recipes/{one.recipe}.toml").read_text()))
    rate = settings.pop("trainer.optimizer.lr") * factor
    settings |= {"name": f"composition-{one.key}".replace("_", "-"), "trainer.optimizer.lr": rate}
    settings |= {"rollout.batch_size": BATCH, "trainer.micro_batch_size": BATCH}
    settings |= _data(one, seed, others.absolute())
    return Run(RECIPE, seed, directory, as_changes(settings), rewards=REWARDS)


def _data(one: Algorithm, seed: int, others: Path) -> dict[str, Any]:
    """Settings of what it learns from, `SAMPLES` of them a step."""
    if one.reads_pairs:
        pairs = {"data.train": str(others / PAIRS), "data.validation": HELD_OUT}
        return {**pairs, "rollout.group_size": 2, "rollout.prompts_per_step": SAMPLES // 2}
    if not one.teachers:
        return {"data.validation": HELD_OUT}
    sources = [{"name": key, "path": f"{PROMPTS}/small_train.jsonl"} for key in one.teachers]
    sources[0]["validation"] = HELD_OUT
    taught = {key: {"adapter": str(_taught(key, seed, others)), "sources": [key]} for key in one.teachers}
    parts = {"data": {"sources": sources}, "algorithm.teachers": taught}
    return {**parts, "rollout.group_size": 1, "rollout.prompts_per_step": SAMPLES}


def _taught(key: str, seed: int, others: Path) -> Path:
    """What a teacher of this seed left, at its best learning rate."""
    teacher = algorithm_of(key)
    return place_of(teacher, best_factor(teacher, others) or 1.0, seed, others) / "model"


def add_base(parser: argparse.ArgumentParser) -> None:
    """The model that all runs begin with, `model`, and whether theirs stay, `keep_models`."""
    parser.add_argument("--keep-models", action="store_true", help="in each run's folder, as `model`")
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
    parser.add_argument("what", choices=("train", "page"))
    keys = [one.key for one in ALGORITHMS]
    parser.add_argument("--algorithms", nargs="+", choices=keys, metavar="NAME", help=f"to train, of {', '.join(keys)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help=f"{FIRST_SEED} tries learning rates")
    add_options(parser)
    add_base(parser)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument("--page", type=Path, default=PAGE, help="that `page` rewrites (docs/results.md)")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="print alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
