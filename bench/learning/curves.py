"""The figures of docs/results.md: every algorithm's recipe with several seeds, every run on a fresh stack of its own.

    python -m bench.learning.curves --parallel 8   runs into runs/learning/<recipe>-<seed>; a run that is there is kept
    python -m bench.learning.curves --table-only     draws and writes from what is there

Writes docs/images/learning*.png and the tables of docs/results.md, and prints these. A run takes two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from bench.learning.results import (
    TARGET,
    Result,
    curve,
    link,
    merged,
    read_all,
    results_row,
    results_table,
    settings_row,
    settings_table,
    title_of,
)
from bench.learning.runs import Run, add_options, own_cores, places, report, train_all, train_here
from docs.generate.markdown import content, rewrite
from flowfleet.demo.plots import learning_panels

Suite = Literal["signs", "newer", "videos", "answers"]


@dataclass(frozen=True)
class Entry:
    """A line of the tables."""

    title: str
    recipe: str
    suite: Suite = "signs"
    is_control: bool = False
    """Its learning rate is next to nothing, and it runs once."""
    teachers: tuple[tuple[str, str], ...] = ()
    """Its teachers' names and the recipes that train them, with the same seed."""

    @property
    def key(self) -> str:
        """What its directories begin with."""
        return f"{self.recipe}_control" if self.is_control else self.recipe


ENTRIES = (
    Entry("Flow-GRPO", "tiny_ocr"),
    Entry("Flow-GRPO, full", "tiny_ocr_full"),
    Entry("Flow-CPS", "tiny_flow_cps"),
    Entry("MixGRPO", "tiny_mix_grpo"),
    Entry("GRPO-Guard", "tiny_grpo_guard"),
    Entry("Flow-DPPO", "tiny_flow_dppo"),
    Entry("DanceGRPO", "tiny_dance_grpo"),
    Entry("DiffusionNFT", "tiny_diffusion_nft"),
    Entry("DiffusionNFT, full", "tiny_diffusion_nft_full"),
    Entry("online DPO", "tiny_online_dpo"),
    Entry("DPO from pairs", "tiny_dpo"),
    Entry("TempFlow-GRPO", "tiny_temp_flow_grpo", "newer"),
    Entry("GARDO", "tiny_gardo", "newer"),
    Entry("AWM", "tiny_awm", "newer"),
    Entry("ELBO-PG", "tiny_elbo_pg", "newer"),
    Entry("DGPO", "tiny_dgpo", "newer"),
    Entry("CRD", "tiny_crd", "newer"),
    Entry("previews", "tiny_previews", "newer"),
    Entry("DiffusionOPD", "tiny_diffusion_opd", "newer", teachers=(("words", "tiny_ocr"), ("small", "tiny_guarded"))),
    Entry("Flow-GRPO", "tiny_video", "videos"),
    Entry("DanceGRPO", "tiny_video_dance", "videos"),
    Entry("DiffusionNFT", "tiny_video_nft", "videos"),
    Entry("GSPO", "tiny_gspo", "answers"),
    Entry("frozen", "tiny_ocr", "signs", is_control=True),
    Entry("frozen", "tiny_video", "videos", is_control=True),
    Entry("frozen", "tiny_gspo", "answers", is_control=True),
)
FROZEN = "trainer.optimizer.lr=1e-12"
PAGE = Path("docs/results.md")
SETTINGS = "learning-settings"
"""Part of the page. Recipes without runs keep their rows."""
IMAGES = Path("docs/images")
PICTURES = {
    "signs": "learning_algorithms.png",
    "newer": "learning_newer.png",
    "videos": "learning_video.png",
    "answers": "learning_text.png",
}
MEDIA = {"signs": "pictures", "newer": "pictures", "videos": "videos", "answers": "answers"}
TAUGHT = {"newer": "signs"}
"""What a suite teaches, where its name does not say it."""
Results = dict[Entry, list[Result]]


def main() -> int:
    options, console = _parser().parse_args(), Console(width=200)
    if options.only:
        recipe, seed, directory = options.only
        run = Run(recipe, int(seed), Path(directory), tuple(options.set), options.keep_model, tuple(options.reward))
        train_here(run, options.cores or own_cores()[0])
        return 0
    entries = [entry for entry in ENTRIES if options.recipes is None or entry.recipe in options.recipes]
    runs = plan(entries, options.seeds, options.directory, options.validate_every, options.set)
    errors: dict[Run, str] = {}
    if not options.table_only:
        first, where = teachers(entries, options.seeds, options.directory), places(options)
        started = time.monotonic()
        errors = train_all(lambda _: first, where, options.budget, console)
        errors |= train_all(lambda _: runs, where, options.budget - (time.monotonic() - started), console)
    results = read_all(ENTRIES, options.seeds, options.directory)
    if options.page is not None and results:
        draw(results, options.page.parent / IMAGES.name)
        made = parts(results)
        made[SETTINGS] = merged(content(options.page.read_text(), SETTINGS), made[SETTINGS])
        rewrite(options.page, made)
    console.print("\n\n".join(parts(results).values()), markup=False, highlight=False, soft_wrap=True)
    return report(runs, errors, console)


def plan(
    entries: Sequence[Entry], seeds: Sequence[int], directory: Path, every: int, changes: Sequence[str] = ()
) -> list[Run]:
    """All runs, seed after seed, so that an early end leaves whole seeds. A control runs with the first seed alone."""
    runs = []
    for index, seed in enumerate(seeds):
        for entry in entries:
            if entry.is_control and index:
                continue
            frozen = (FROZEN,) if entry.is_control else ()
            taught = (
                f"algorithm.teachers.{name}.adapter={_teacher(recipe, seed, directory) / 'model'}"
                for name, recipe in entry.teachers
            )
            settings = (f"schedule.validate_every={every}", *frozen, *taught, *changes)
            runs.append(Run(entry.recipe, seed, directory / f"{entry.key}-{seed}", settings))
    return runs


def teachers(entries: Sequence[Entry], seeds: Sequence[int], directory: Path) -> list[Run]:
    """Runs whose models others learn from: as their recipes say, each once."""
    recipes = dict.fromkeys(recipe for entry in entries for _, recipe in entry.teachers)
    return [
        Run(recipe, seed, _teacher(recipe, seed, directory), keeps_model=True) for seed in seeds for recipe in recipes
    ]


def _teacher(recipe: str, seed: int, directory: Path) -> Path:
    return (directory / "teachers" / f"{recipe}-{seed}").absolute()


def parts(results: Results) -> dict[str, str]:
    """The generated parts of the page by name."""
    made: dict[str, str] = {}
    for suite, picture in PICTURES.items():
        chosen = {entry: runs for entry, runs in results.items() if entry.suite == suite}
        if chosen:
            shown = f"![Held-out reward of each recipe over the {MEDIA[suite]} that it generated](images/{picture})"
            made[f"learning-{suite}"] = f"{shown}\n\n{_results_of(chosen, MEDIA[suite])}"
    learned = [(entry.recipe, runs[0].settings) for entry, runs in results.items() if not entry.is_control]
    made[SETTINGS] = settings_table(settings_row(link(recipe), settings) for recipe, settings in learned)
    return made


def _results_of(results: Results, media: str) -> str:
    rows = [
        results_row(f"{link(entry.recipe)}{', frozen' * entry.is_control}", title_of(runs[0].settings), runs)
        for entry, runs in results.items()
    ]
    return results_table(rows, media)


def draw(results: Results, directory: Path) -> None:
    """Each suite's panels."""
    for suite, media in MEDIA.items():
        chosen = {entry: [curve(run) for run in runs] for entry, runs in results.items() if entry.suite == suite}
        panels = {entry.title: curves for entry, curves in chosen.items() if not entry.is_control}
        control = [seen for entry, curves in chosen.items() if entry.is_control for seen in curves]
        if panels:
            title = f"How well each algorithm teaches the tiny model of {TAUGHT.get(suite, suite)}"
            about = f"Each line is a seed; {'dashed: frozen; ' if control else ''}dotted: {TARGET}"
            learning_panels(directory / PICTURES[suite], panels, control, title, about, f"{media} generated", TARGET)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recipes = sorted({entry.recipe for entry in ENTRIES})
    parser.add_argument("--recipes", nargs="+", choices=recipes, metavar="RECIPE", help=f"of {', '.join(recipes)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_options(parser)
    parser.add_argument("--validate-every", type=int, default=2, help="steps between validations (2)")
    parser.add_argument("--directory", type=Path, default=Path("runs/learning"))
    parser.add_argument("--table-only", action="store_true", help="train nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="rewritten, with its pictures (docs/results.md)")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="print alone")
    parser.add_argument("--only", nargs=3, metavar=("RECIPE", "SEED", "DIRECTORY"), help="one run, in this process")
    parser.add_argument("--reward", action="append", default=[], metavar="REWARD", help="of --only: as `up` takes it")
    parser.add_argument("--keep-model", action="store_true", help="of --only: leave the trained model")
    parser.add_argument("--cores", type=int, nargs="+", help="of --only (the first two)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
