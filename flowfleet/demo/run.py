"""The demo from start to end: a fresh stack, one job by REST, its results on disk, the stack gone again."""

import itertools
import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from flowfleet.api.jobs import Job
from flowfleet.client.client import Client
from flowfleet.client.progress import duration, follow
from flowfleet.demo import plots
from flowfleet.demo.results import Outcome, fetch, fetch_pairs, fetch_texts, held_out_curve, summarize, training_curve
from flowfleet.job.files import data_folders, prepare_job
from flowfleet.job.spec import JobSpec
from flowfleet.local.files import write_atomically
from flowfleet.local.plan import StackOptions, usual_replicas
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack, stop_stack
from flowfleet.local.stack import StackError, StateDir
from flowfleet.models.registry import Engine

MARKER = ".flowfleet-demo"
"""The job as submitted. Says that a directory was made by the demo, and may be replaced by the next one."""
PICTURES, TEXTS = "before_after.png", "before_after.txt"


def run_demo(
    recipe: Path,
    directory: Path,
    changes: Sequence[str],
    console: Console,
    started: datetime | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Leaves everything in `directory` and returns the summary. Raises ValueError, StackError or ApiError.

    `changes` are settings as `key=value`; `started` is when the clock began, by default this process; `engine` is what
    samples, by default `transformers` for a model that writes text and `diffusers` for others. Each reward of the
    recipe starts as the scorer of its name.
    """
    started = started or datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    spec = prepare_job(recipe, changes, same_machine=True)
    if not spec.rewards or not spec.data.is_validated:
        raise ValueError(f"{recipe} leaves nothing to compare: give it rewards and data.validation")
    _make_fresh(directory, spec)
    with (
        local_stack(_stack_options(spec, directory, engine)) as stack,
        Client(stack.url) as client,
    ):
        _say(console, f"The stack runs ({', '.join(stack.processes)}); its page is {stack.page}.")
        job = client.submit(spec)
        _say(console, f"Job {job.id} is submitted; logs are in {stack.state_dir}/logs.\n")
        outcome = _train(client, job, StateDir(Path(stack.state_dir)), console)
        pairs = [] if spec.writes_tokens else list(fetch_pairs(client, outcome))
        if spec.writes_tokens:
            (directory / TEXTS).write_text(fetch_texts(client, outcome), encoding="utf-8")
        shutil.copytree(outcome.job.results["model"], directory / "model")
    _draw(outcome, pairs, directory)
    summary = summarize(outcome, started, datetime.now(UTC))
    write_atomically(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    _tell(summary, directory, console)
    return summary


def _make_fresh(directory: Path, spec: JobSpec) -> None:
    """Empties a directory of an earlier demo, whose stack is ended first should it still live. Raises ValueError for a
    directory of something else."""
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise ValueError(f"{directory} holds something else than a demo: give another --state-dir, or remove it")
        stop_stack(StateDir(directory / "stack"))
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).write_text(spec.model_dump_json(indent=2) + "\n")


def _stack_options(spec: JobSpec, directory: Path, engine: Engine | None) -> StackOptions:
    engine = engine or ("transformers" if spec.writes_tokens else "diffusers")
    replicas, model = usual_replicas(engine), spec.model
    return StackOptions(
        state_dir=directory / "stack",
        port=0,
        data_roots=data_folders(spec),
        pools=(Pool(replicas=replicas, model=model.path, dtype=model.dtype, engine=engine),),
        rewards=tuple(spec.reward_services),
    )


def _train(client: Client, job: Job, state: StateDir, console: Console) -> Outcome:
    seen, recorded = itertools.tee(client.events(job.id))
    follow(job, seen, console)
    ended = client.job(job.id)
    if ended.status != "succeeded":
        tail = state.log_tail("controller")
        raise StackError(f"the job {ended.status}: {ended.reason or 'no reason given'}; the controller's log:\n{tail}")
    return fetch(client, job.id, list(recorded))


def _draw(outcome: Outcome, pairs: list[plots.Pair], directory: Path) -> None:
    parts = outcome.job.spec["rewards"]
    rewards = ", ".join([name for name, part in parts.items() if part["weight"]] or parts)
    held_out = held_out_curve(outcome)
    gain = f"{held_out.rewards[0]:.2f} → {held_out.rewards[-1]:.2f} on {len(outcome.pairs)} held-out prompts"
    about = f"reward {rewards} · {gain} · {held_out.samples[-1]:,} samples · seed {outcome.job.spec['seed']}"
    title = f"{outcome.job.name}: reward over training"
    plots.reward_curve(directory / "reward_curve.png", training_curve(outcome.rows), held_out, title, about)
    title = "The same prompts and noise, before and after training"
    about = f"The first {len(pairs)} of {len(outcome.pairs)} held-out prompts, each with its score ({rewards})"
    if pairs:
        plots.before_after(directory / PICTURES, pairs, title, about)
    with (directory / "metrics.jsonl").open("w") as file:
        for row in outcome.rows:
            file.write(json.dumps({"step": row.step, **row.values}) + "\n")


def _tell(summary: dict[str, Any], directory: Path, console: Console) -> None:
    low, high = summary["bootstrap_ci95"]
    before, after = summary["held_out_reward_before"], summary["held_out_reward_after"]
    training, first, total = (
        duration(summary[name]) for name in ("training_seconds", "seconds_to_first_step", "total_seconds")
    )
    gain = f"+{after - before:.3f}" if after >= before else f"{after - before:.3f}"
    lines = [
        f"\nHeld-out reward {before:.3f} → {after:.3f}: {gain} (95 % {low:+.3f} … {high:+.3f})",
        *map(_watched_line, summary["watched"].items()),
        f"{summary['samples_trained']} samples trained on, {summary['samples_dropped']} dropped",
        f"{training} of training, {first} to its first step, {total} in all\n",
    ]
    made = {
        "summary.json": "all figures",
        "reward_curve.png": "training and held-out reward",
        PICTURES: "pictures before and after",
        TEXTS: "texts before and after",
        "metrics.jsonl": "one row a step",
        "model": "the trained model",
        "stack/logs": "logs of every process",
    }
    there = {name: what for name, what in made.items() if (directory / name).exists()}
    width = max(len(str(directory / name)) for name in there)
    for line in [*lines, *(f"  {directory / name!s:<{width}}  {what}" for name, what in there.items())]:
        _say(console, line)


def _watched_line(item: tuple[str, dict[str, Any]]) -> str:
    name, seen = item
    low, high = seen["bootstrap_ci95"]
    gain = f"{seen['after'] - seen['before']:+.3f} (95 % {low:+.3f} … {high:+.3f})"
    return f"{name}, of weight 0: {seen['before']:.3f} → {seen['after']:.3f}, {gain}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
