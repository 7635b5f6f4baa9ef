"""Composition: what a setting changes for Flow-GRPO, and what holds back a reward that is pushed too far.

    python -m bench.learning.ablations staleness --gpus 0 --parallel 8    [--model FOLDER] [--set KEY=VALUE …]
    python -m bench.learning.ablations group window guidance guards …
    python -m bench.learning.ablations gradient --model recipes/composition/model --parallel 2    # on CPUs

Each line of a study is Flow-GRPO's job of `bench.learning.composition` (some have other algorithms'), at the learning
rate that was best there, with changes of its own; every line of a study makes as many pictures. How old samples may be
is a limit, and how old they were is a column: small micro-batches slow the trainer, so that samples grow old.
`gradient` pushes ReFL at twice its best rate. `resolution` wants a base that draws both sizes
(`recipes.composition.pretrain --larger 128`, by `--model FOLDER`), `resolution_256` one of `--size 128 --larger 256`.
`medium` and `full` have lines in those worlds, `full_settings` compares ways to train by Flow-GRPO in the full one.
Without --model, which wants the judges in $FLOWFLEET_COMPOSITION_JUDGES, a world's base and judges are made first, in
DIRECTORY/worlds. Runs go into DIRECTORY/<study>/<line>-<seed>; a run that is there is kept. --page rewrites each
study's part of a page, and --curves draws its curves; with --table-only nothing is trained:

    python -m bench.learning.ablations medium --table-only --page docs/results.md --curves docs/images
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.learning.composition import (
    DIRECTORY,
    PROMPTS,
    REWARD,
    SAMPLES,
    SCORE,
    Algorithm,
    add_base,
    algorithm_of,
    base_of,
    chosen_factors,
    judged,
    lasting,
    make_first,
    run_of,
    saying,
)
from bench.learning.jobs import SMOOTH, SMOOTHED
from bench.learning.results import Point, Result, changes, curve, made_a_step, read_all, spread
from bench.learning.runs import Run, add_options, places, report, train_all
from bench.learning.shared import shared_rewards
from bench.learning.worlds import make_world, parts, world_of
from docs.generate.markdown import content, rewrite, table
from flowfleet.demo.demos import DEMOS, WIDER, Made
from flowfleet.demo.plots import INK, QUIET, SECOND, THIRD, Curve, learning_panels, measure_panels
from flowfleet.demo.plots import Line as Drawn

FLOW_GRPO, FLOW_GRPO_FULL, CPS, AWM, CRD, NFT_FULL, REFL = (
    algorithm_of(key) for key in ("ocr", "ocr_full", "flow_cps", "awm", "crd", "diffusion_nft_full", "refl")
)
AIM: Final = 0.85
"""Mean score of the judge at which the larger worlds aim."""
COLORS: Final = (SECOND, THIRD, INK, QUIET)
"""Colors of a study's lines in one panel."""
USUAL: Final = lasting(48, 12)
PUSHED: Final = lasting(96, 24)
"""Length of a line whose reward is pushed until it is hacked."""
QUALITY_GATE: Final = ("rewards.image_quality.weight=0.0", 'rewards.image_quality.gate={below=0.3,action="mask"}')
"""24 pictures of the shipped base had an image_quality of 0.44 on average, with a deviation of 0.16: one below."""
DOUBTED: Final = (
    "rewards.image_quality.weight=0.0",
    'algorithm.kl_gate={rewards=["image_quality"]}',
    "algorithm.kl_reference={every=3}",
)
"""GARDO's KL: of samples that image_quality doubts alone, to the policy of every three training steps."""
CORRECTED: Final = ('algorithm.correction.mode="truncated"',)


def _large(world: str, split: str = "train") -> tuple[str, ...]:
    """Settings of a world of 128×128 pixels, which trains on the prompts of `split`. Without guidance the full one's
    base shows one prompt in ten."""
    return (
        f'data.train="{PROMPTS}/{world}_{split}.jsonl"',
        f'data.validation="{PROMPTS}/{world}_seen.jsonl"',
        *("rollout.height=128", "rollout.width=128", "rollout.num_inference_steps=10", "rollout.guidance_scale=3"),
        "schedule.save_every=50",
    )


FULL_WORLD: Final = _large("full")
MEDIUM_WORLD: Final = (
    *_large("medium", "weighted"),
    'model.dtype="bfloat16"',
    *("rollout.prompts_per_step=24", f"rollout.batch_size={SAMPLES}", f"trainer.micro_batch_size={SAMPLES}"),
    *(f"rewards.{REWARD}.weight=0.0", f"rewards.{SMOOTH}.weight=1.0"),
    'trainer.optimizer.lr_schedule="cosine"',
    *("trainer.deterministic=false", "trainer.compile=true", "rollout.compile=true", "schedule.max_staleness=1"),
)
"""Twice the pictures a step, in the type that real models have, paid by the smooth score: a base of 32,000 steps gets
most points of the reward, and a quarter of its groups all of them. Of what it paints wrong there are more prompts.
Compiled and one step behind, Flow-GRPO's step takes half of its time, and a quarter of its best rate in the small
world: at half of it, one step behind, seed 2 broke here. DiffusionNFT at 5e-5 broke one step behind too, so its line
is on-policy."""


@dataclass(frozen=True)
class Line:
    """A line of a study."""

    title: str
    changes: tuple[str, ...] = ()
    algorithm: Algorithm = FLOW_GRPO
    length: tuple[str, ...] = USUAL

    @property
    def key(self) -> str:
        """What its directories begin with."""
        return self.title.replace(" × ", "x").replace(", ", "-").replace(" ", "_")


def _stale(versions: int) -> tuple[str, ...]:
    """Allows samples up to `versions` old, which rules out deterministic batches, and slows the trainer."""
    return (f"schedule.max_staleness={versions}", "trainer.deterministic=false", "trainer.micro_batch_size=36")


def _sizes(small: int, large: int) -> list[Line]:
    """Lines trained on small pictures, on the same and judged on large ones, and trained on large ones."""
    at_small, at_large = ((f"rollout.height={edge}", f"rollout.width={edge}") for edge in (small, large))
    judged_at_large = (f"schedule.validation_height={large}", f"schedule.validation_width={large}")
    return [
        Line(f"{small} pixels", at_small),
        Line(f"{small}, judged at {large}", (*at_small, *judged_at_large)),
        Line(f"{large} pixels", at_large),
    ]


STUDIES: Final[Mapping[str, Sequence[Line]]] = {
    "staleness": [
        *(Line(f"at most {versions}", _stale(versions)) for versions in (0, 1, 2, 4, 8)),
        *(Line(f"at most {versions}, corrected", _stale(versions) + CORRECTED) for versions in (1, 2, 4, 8)),
    ],
    "group": [
        Line(f"{prompts} × {size}", (f"rollout.prompts_per_step={prompts}", f"rollout.group_size={size}"))
        for prompts, size in ((36, 4), (24, 6), (12, 12), (6, 24))
    ],
    "window": [
        *(Line(f"first {size}", (f"rollout.window.size={size}",)) for size in (1, 2, 4, 6)),
        Line("moving 2", ('rollout.window.strategy="random"', "rollout.window.size=2")),
    ],
    "resolution": _sizes(64, 128),
    "resolution_256": _sizes(128, 256),
    "guidance": [
        Line(f"{one.title}, guidance {scale}", (f"rollout.guidance_scale={scale}",), one)
        for one in (FLOW_GRPO, AWM)
        for scale in (1, 2, 3, 4)
    ],
    "medium": [
        Line(FLOW_GRPO_FULL.title, (*MEDIUM_WORLD, "trainer.optimizer.lr=5e-5"), FLOW_GRPO_FULL, lasting(320, 80)),
        Line(NFT_FULL.title, (*MEDIUM_WORLD, "schedule.max_staleness=0"), NFT_FULL, lasting(160, 80)),
        *(Line(one.title, MEDIUM_WORLD, one, lasting(160, 80)) for one in (AWM, CRD)),
    ],
    "full": [
        Line(one.title, FULL_WORLD, one, lasting(400, 40))
        for one in (FLOW_GRPO, FLOW_GRPO_FULL, CPS, NFT_FULL, AWM, CRD)
    ],
    "full_settings": [
        Line(title, (*FULL_WORLD, *changes), one, lasting(60, 30))
        for title, one, changes in (
            ("LoRA", FLOW_GRPO, ()),
            ("all weights, 2e-4", FLOW_GRPO_FULL, ("trainer.optimizer.lr=2e-4",)),
            ("all weights, 1e-4", FLOW_GRPO_FULL, ("trainer.optimizer.lr=1e-4",)),
            ("Flow-CPS", CPS, ()),
        )
    ],
    "gradient": [
        Line(title, ("trainer.optimizer.lr=2.4e-3", *changes), REFL, lasting(110, 10))
        for title, changes in (
            ("reward alone", ()),
            ("ceiling 0.7", ("algorithm.reward_ceiling=0.7",)),
            ("KL 1", ("algorithm.kl_coef=1.0",)),
            ("KL 10", ("algorithm.kl_coef=10.0",)),
            ("gate", QUALITY_GATE),
            ("second reward", ("rewards.image_quality.weight=0.5",)),
            ("KL 1 where doubted", ("algorithm.kl_coef=1.0", *DOUBTED)),
        )
    ],
    "guards": [
        Line("reward alone", length=PUSHED),
        Line("KL", ("algorithm.kl_coef=0.04",), length=PUSHED),
        Line("gate", QUALITY_GATE, length=PUSHED),
        Line("second reward", ("rewards.image_quality.weight=0.5",), length=PUSHED),
        Line(
            "GARDO",
            (
                'algorithm.advantage_std="none"',
                "rewards.diversity.weight=0.0",
                'algorithm.diversity="diversity"',
                "algorithm.kl_coef=0.04",
                *DOUBTED,
            ),
            length=PUSHED,
        ),
    ],
}
"""Settings that users ask for most, and what hinders a hacked reward."""


def main() -> int:
    options, console = _parser().parse_args(), Console(width=200)
    runs, errors = list[Run](), dict[Run, str]()
    try:
        if options.page is not None:
            for study in options.studies:
                content(options.page.read_text(), _part(study))
        if unknown := {*(options.lines or ())} - {line.title for study in options.studies for line in STUDIES[study]}:
            raise ValueError(f"--lines: no study of these has {', '.join(sorted(unknown))}")
        if not options.table_only:
            where, begun = places(options), time.monotonic()
            made = _own_world(options)
            given = (base_of(options), *options.set)
            asked = options.seeds, options.directory, given, options.lines
            runs = [run for study in options.studies for run in plan(study, *asked)]
            runs = [replace(run, keeps_model=options.keep_models) for run in runs]
            make_first(options, (), console)
            if made:
                make_world(made, options.gpus.split(","), saying(console))
            with shared_rewards(where, DEMOS["composition"].rewards) as sharing:
                errors = train_all(lambda _: runs, sharing, options.budget - (time.monotonic() - begun), console)
    except (ValueError, OSError) as mistake:
        sys.exit(str(mistake))
    tables = {}
    for study in options.studies:
        results = read_all(STUDIES[study], options.seeds, options.directory / study, SCORE)
        if results:
            tables[_part(study)] = study_table(results)
            if options.curves is not None:
                draw(results, options.curves / f"learning_composition_{study}.png", study)
                if len(results) <= len(COLORS):
                    draw_costs(results, options.curves / f"learning_composition_{study}_costs.png", study)
        table_of = study_table(results) if results else f"no finished run in {options.directory / study}"
        console.print(f"{study}\n\n{table_of}\n", markup=False, highlight=False, soft_wrap=True)
    if options.page is not None:
        rewrite(options.page, tables)
    return report(runs, errors, console)


def _own_world(options: argparse.Namespace) -> list[Made]:
    """What has to be made for studies of a larger world whose base is not given, which becomes `model`."""
    world = world_of(options.studies)
    if world is None or options.model != WIDER.path:
        return []
    made = parts(world, options.directory / "worlds")
    options.model = made[0].path
    return made


def _part(study: str) -> str:
    """Its part of a page."""
    return f"learning-composition-{study}"


def plan(
    study: str, seeds: Sequence[int], directory: Path, given: Sequence[str] = (), titles: Sequence[str] | None = None
) -> list[Run]:
    """All runs of a study, or of its lines of these titles, seed after seed, so that an early end leaves whole seeds. A
    line's changes come after those that are given. ValueError where none of an algorithm's learning rates was tried."""
    lines = [line for line in STUDIES[study] if titles is None or line.title in titles]
    factors = chosen_factors(list(dict.fromkeys(line.algorithm for line in lines)), directory)
    runs = []
    for seed in seeds:
        for line in lines:
            one = line.algorithm
            run = run_of(one, factors[one], seed, directory / study / f"{line.key}-{seed}", directory)
            changes = (*run.changes, *line.length, *given, *line.changes)
            follows = any(change.startswith(f"rewards.{SMOOTH}.") for change in changes)
            rewards = tuple(reward for reward in run.rewards if reward != SMOOTHED or follows)
            runs.append(replace(run, changes=changes, rewards=rewards))
    return runs


def study_table(results: Mapping[Line, Sequence[Result]]) -> str:
    """A line of the study in each row."""
    header = (
        *("", "seeds", "judge before", "after", "gain", "at least", "reward after"),
        *("versions behind", "seconds of training", "edges", "colors"),
    )
    return table(header, [_row(line, runs) for line, runs in results.items()])


def draw(results: Mapping[Line, Sequence[Result]], path: Path, study: str) -> None:
    """A panel a line of the study: the judge's mean score over the pictures made, and dotted 0.85."""
    panels = {line.title: [curve(run) for run in runs] for line, runs in results.items()}
    about = f"Study {study}: each line is a seed; dotted: {AIM}"
    title = "The judge that training never sees"
    learning_panels(path, panels, (), title, about, "pictures generated", AIM, y_label="the judge's mean score")


def draw_costs(results: Mapping[Line, Sequence[Result]], path: Path, study: str) -> None:
    """A panel a cost: the judge's mean score over pictures, steps and seconds, each seed in its line's color."""

    def panel(amount: Callable[[Result, Point], float]) -> list[Drawn]:
        return [
            Drawn(
                line.title,
                Curve([round(amount(run, one)) for one in run.points], [one.reward for one in run.points]),
                color,
            )
            for (line, runs), color in zip(results.items(), COLORS, strict=False)
            for run in runs
        ]

    panels = {
        "over pictures generated": panel(lambda _, one: one.generated),
        "over training steps": panel(lambda run, one: one.generated / made_a_step(run.settings["rollout"])),
        "over seconds of training": panel(_seconds),
    }
    measure_panels(
        path, panels, "What the judge's score costs", f"Study {study}: the judge's mean score, a line a seed", ""
    )


def _seconds(run: Result, point: Point) -> float:
    """Spreads the summary's seconds of training as the phases', which overlap where samples may be old."""
    seconds: float = run.summary["training_seconds"]
    return seconds * point.seconds / (run.points[-1].seconds or 1.0)


def _row(line: Line, runs: Sequence[Result]) -> list[str]:
    seconds = [run.summary["training_seconds"] for run in runs]
    return [
        line.title,
        str(len(runs)),
        *judged(runs),
        spread([run.summary["held_out_reward_after"] for run in runs], ".3f"),
        f"{statistics.fmean(run.staleness for run in runs):.2f}",
        f"{statistics.fmean(seconds):.0f}",
        *changes(runs),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lines", nargs="+", metavar="TITLE", help="of these lines alone, as `AWM`")
    add_options(parser)
    add_base(parser)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where the algorithms' runs are")
    parser.add_argument("--table-only", action="store_true", help="train nothing")
    parser.add_argument("--page", type=Path, help="whose parts learning-composition-STUDY are rewritten")
    parser.add_argument("--curves", type=Path, metavar="FOLDER", help="where learning_composition_STUDY.png is drawn")
    return parser


if __name__ == "__main__":
    sys.exit(main())
