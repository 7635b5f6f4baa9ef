"""The figures of docs/results.md about rewards: one that is hacked and the same with guards, a judge that trains, and a
judge whose gradient does.

    python -m bench.rewards.learning hacking        recipes tiny_hacked and tiny_guarded with seeds
    python -m bench.rewards.learning judge          teaches and serves the tiny judge; tiny_judge with seeds, and frozen
    python -m bench.rewards.learning gradients      the same judge inside a service: tiny_refl and tiny_srpo, and frozen
    python -m bench.rewards.learning page           draws and writes from what is there

Every job of a command runs on one stack, one after the other, in runs/reward_learning/NAME-SEED; what is there is kept.
Results go to bench/results, pictures and tables to docs. Runs on two CPU cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.rewards.judge_processes import JudgeService, judge_service, local_judge, teach
from bench.rewards.page import Topic, draw, parts
from bench.rewards.runs import Trained, record
from docs.generate.markdown import rewrite
from flowfleet.client.client import Client
from flowfleet.job.files import prepare_job
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack, stop_stack
from flowfleet.local.stack import StateDir

FROZEN = ("trainer.optimizer.lr=1e-12", "rollout.prompts_per_step=2", "rollout.group_size=2")
"""Settings of the control run: it learns nothing and so needs few pictures."""
BUSY_EVERY = 50
"""Number of questions per refusal: the judge's server rejects one as a busy server does, and the judge retries."""
PAGE = Path("docs/results.md")
RESULTS = Path("bench/results/rewards")
RUNS = Path("runs/reward_learning")
PROMPTS = Path("recipes/tiny/prompts/validation.txt")


@dataclass(frozen=True)
class Plan:
    """One job."""

    name: str
    recipe: str
    seed: int
    changes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its directory's name."""
        return f"{self.name}-{self.seed}"


def hacking_plans(seeds: Sequence[int]) -> list[Plan]:
    return [Plan(name, f"tiny_{name}", seed) for seed in seeds for name in ("hacked", "guarded")]


def judge_plans(seeds: Sequence[int]) -> list[Plan]:
    """The control has the first seed, so that its held-out pictures are those of that job before training."""
    control = Plan("frozen", "tiny_judge", seeds[0], FROZEN)
    return [Plan("judge", "tiny_judge", seeds[0]), control, *(Plan("judge", "tiny_judge", seed) for seed in seeds[1:])]


def gradient_plans(seeds: Sequence[int]) -> list[Plan]:
    """The control has the first seed."""
    return [
        *(Plan(name, f"tiny_{name}", seed) for seed in seeds for name in ("refl", "srpo")),
        Plan("still", "tiny_refl", seeds[0], FROZEN),
    ]


def main() -> int:
    options, console = _parser().parse_args(), Console(width=160)
    if options.what == "hacking":
        own = ("jpeg_compressibility", "ocr", "image_quality")
        _run(hacking_plans(options.seeds), own, options, console, None)
    elif options.what == "judge":
        checkpoint = options.directory / "teach"
        teach(checkpoint, options.lessons)
        with judge_service(checkpoint, options.directory / "judge_service", BUSY_EVERY) as judge:
            rewards = (f"judge={judge.address}", "ocr")
            _run(judge_plans(options.seeds), rewards, options, console, judge)
    elif options.what == "gradients":
        checkpoint = options.directory / "teach"
        teach(checkpoint, options.lessons)
        with local_judge(checkpoint, options.directory / "local_judge") as address:
            _run(gradient_plans(options.seeds), (f"judge={address}", "ocr"), options, console, None)
    write_page(options.directory, options.page)
    return 0


def write_page(directory: Path, page: Path) -> None:
    """Results, pictures and tables of all runs in a directory."""
    runs = [Trained.read(path) for path in sorted(directory.glob("*/run.json"))]
    topics: dict[Topic, tuple[str, ...]] = {
        "hacking": ("hacked", "guarded"),
        "judge": ("judge", "frozen"),
        "gradients": ("refl", "srpo", "still"),
    }
    for topic, names in topics.items():
        chosen = [run for name in names for run in runs if run.name == name]
        if chosen:
            text = json.dumps([run.figures for run in chosen], indent=1)
            (RESULTS / f"learning-{topic}.json").write_text(text + "\n")
            draw(topic, chosen, directory, page.parent / "images")
            rewrite(page, parts(topic, chosen))


def _run(
    plans: Sequence[Plan],
    rewards: tuple[str, ...],
    options: argparse.Namespace,
    console: Console,
    judge: JudgeService | None,
) -> None:
    todo = [plan for plan in plans if not (options.directory / plan.key / "run.json").exists()]
    if not todo:
        return
    held_out = _held_out(options.directory, options.held_out)
    with _stack(options.directory / "stack", rewards) as client:
        for plan in todo:
            changes = [f"seed={plan.seed}", f"data.validation={held_out}", *plan.changes, *options.set]
            before = judge.counters() if judge else {}
            trained = _train(client, plan, changes, options.directory / plan.key)
            if judge:
                counted = {name: value - before.get(name, 0.0) for name, value in judge.counters().items()}
                trained = replace(trained, judge=counted)
            trained.write(options.directory / plan.key)
            console.print(f"{plan.key}: {trained.told}", highlight=False, markup=False)


def _train(client: Client, plan: Plan, changes: Sequence[str], directory: Path) -> Trained:
    spec = prepare_job(Path(f"recipes/{plan.recipe}.toml"), list(changes), same_machine=True)
    job = client.wait(client.submit(spec).id)
    if job.status != "succeeded":
        raise RuntimeError(f"{plan.key}: the job {job.status}: {job.reason}")
    return record(client, job, plan.name, directory)


@contextlib.contextmanager
def _stack(state: Path, rewards: tuple[str, ...]) -> Iterator[Client]:
    """A fresh one: jobs that an ended command left behind would run first."""
    stop_stack(StateDir(state))
    shutil.rmtree(state, ignore_errors=True)
    options = StackOptions(
        state_dir=state, port=0, data_roots=(state.parent,), rewards=rewards, model="recipes/tiny/model"
    )
    with local_stack(options) as stack, Client(stack.url) as client:
        yield client


def _held_out(directory: Path, count: int) -> Path:
    """The first `count` held-out prompts as a file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.absolute() / "held_out.txt"
    path.write_text("\n".join(PROMPTS.read_text().splitlines()[:count]) + "\n")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rewards.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["hacking", "judge", "gradients", "page"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(1 2 3)")
    parser.add_argument("--held-out", type=int, default=48, help="held-out prompts of a validation (48)")
    parser.add_argument("--lessons", type=int, default=400, help="steps of the judge's teaching (400)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job; repeatable")
    parser.add_argument("--directory", type=Path, default=RUNS)
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
