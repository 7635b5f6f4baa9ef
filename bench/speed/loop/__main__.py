"""A whole job as services on this machine's accelerators: images a second and GPU, who waits for whom.

    python -m bench.speed.loop --mode lora --rollouts 1 --trainers 1 --images 128 --steps 4 [--guidance 4] [--compile]
    python -m bench.speed.loop --samples only --rollouts 0 --max-staleness 0 …    the trainer samples for itself
    python -m bench.speed.loop --compare …          then the same functions in one process on the same accelerators
    python -m bench.speed.loop --tiny               everything at a tiny size on the CPU

The model is Qwen-Image at full size with random weights (`bench.speed.full_size`), 512², 10 steps, a window of 2.
Rollouts take the first of the visible accelerators, trainer ranks the next. Samples are up to one version stale, so
sampling and training overlap. Random weights draw noise in which no reader finds words: rewards are equal and gradients
zero, but every phase does all of its work. Steps before `--warm-up` compile and are left out. The job is cancelled when
the last measured step is done. The figures are a line of JSON; stderr tells people.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.speed.full_size import PROMPTS, write_checkpoint
from bench.speed.loop.figures import Row, loop_figures, policy_version, rollout_busy_s
from flowfleet.client.client import Client
from flowfleet.job.files import data_folders
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.local.stack import Stack, StateDir

MANY_STEPS = 10_000
"""More than are measured: the job is cancelled before its last, so that it writes no checkpoint."""
POLL_S = 0.2
STEP_LIMIT_S = 900.0
"""Longest wait for one step."""


@dataclass
class Kill:
    """A rollout that is killed at a step, and how long until it serves again: that version, or a newer one."""

    step: int
    at: float = 0.0
    version: int = 0
    back_after_s: float | None = None


@dataclass
class Watched:
    """What was seen of a job: rows by step, and the rollouts' busy seconds when the warm-up and the last step ended."""

    rows: dict[int, Row] = field(default_factory=dict)
    marks: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    kill: Kill | None = None


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="loop-") as scratch:
        model = options.model or write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
        spec = parse_job(job(options, model))
        figures: dict[str, Any] = {"bench": "loop", "settings": vars_of(options)}
        figures["services"] = run_as_services(options, spec, Path(scratch) / "stack")
        if options.compare:
            from bench.speed.monolith import run_in_one_process  # torch only now: a forked stack needs none of it

            print(summary(figures), file=sys.stderr, flush=True)
            rows = run_in_one_process(spec, options.warm_up + options.steps)[options.warm_up :]
            figures["one_process"] = loop_figures(rows, spec.samples_per_step, gpus(options), {}, 1.0)
            figures["ratio"] = figures["services"]["images_per_s"] / figures["one_process"]["images_per_s"]
    print(summary(figures), file=sys.stderr)
    print(json.dumps(figures), flush=True)
    return 0


def job(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The job file's content."""
    rollout = {
        "prompts_per_step": max(1, options.images // options.group_size),
        "group_size": options.group_size,
        "num_inference_steps": 10,
        "guidance_scale": options.guidance,
        "batch_size": options.batch_size,
        "compile": options.compile,
        "quantization": options.quantization,
        "adapter": options.adapter,
        "noise": {"type": "sde", "eta": 1.2},
        "window": {"strategy": "random", "size": 2, "low": 0, "high": 5},
    }
    if options.tail_steps:
        rollout["tail_steps"] = options.tail_steps
    trainer = {
        "mode": options.mode,
        "world_size": options.trainers,
        "updates_per_step": options.updates,
        "micro_batch_size": options.micro_batch,
        "gradient_checkpointing": options.checkpointing,
        "quantization": options.trainer_quantization,
        "compile": options.compile,
        "samples": options.samples,
        "optimizer": {"lr": 3e-4 if options.mode == "lora" else 3e-5, "state": options.optimizer_state},
    }
    size = {"height": 64, "width": 64} if options.tiny else {}
    dtype = "float32" if options.tiny else "bfloat16"
    return {
        "name": "bench-loop",
        "model": {
            "path": str(model.resolve()),
            "dtype": "bfloat16" if "fp8" in (options.base, options.trainer_quantization) else dtype,
            "load_format": "dummy",
            "base": options.base,
        },
        "data": {"train": str(model.resolve() / PROMPTS)},
        "rollout": rollout | size,
        "rewards": {options.reward: {"params": {"region": "page"} if options.reward == "ocr" else {}}},
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-5, "old_log_probs": options.old_log_probs},
        "trainer": trainer,
        "schedule": {"steps": MANY_STEPS, "save_every": MANY_STEPS, "max_staleness": options.max_staleness},
    }


def run_as_services(options: argparse.Namespace, spec: JobSpec, state_dir: Path) -> dict[str, Any]:
    """Figures of the measured steps. Raises RuntimeError with the ends of the logs where the job failed."""
    stack_options = StackOptions(
        state_dir=state_dir,
        port=0,
        data_roots=data_folders(spec),
        replicas=options.rollouts,
        engine=options.engine,
        max_batch=options.batch_size,
        rewards=(options.reward,),
    )
    with local_stack(stack_options) as stack, Client(stack.url) as client:
        submitted = client.submit(spec)
        try:
            seen = watch(client, submitted.id, stack, options)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{error}\n{ends_of_logs(StateDir(state_dir))}") from None
        finally:
            if options.logs:
                keep_logs(StateDir(state_dir), options.logs)
        client.cancel(submitted.id)
    (start, before), (end, after) = seen.marks
    busy = {name: after[name] - before.get(name, 0.0) for name in after} if seen.kill is None else {}
    rows = [seen.rows[step] for step in sorted(seen.rows) if step >= options.warm_up][: options.steps]
    figures = loop_figures(rows, spec.samples_per_step, gpus(options), busy, end - start)
    if seen.kill is not None:
        figures["kill"] = {"step": seen.kill.step - options.warm_up, "back_after_s": seen.kill.back_after_s}
    return figures


def watch(client: Client, job_id: str, stack: Stack, options: argparse.Namespace) -> Watched:
    """Waits for the last measured step. Raises RuntimeError if the job ends first, TimeoutError if a step takes too
    long."""
    seen = Watched(kill=Kill(options.warm_up + options.kill_rollout) if options.kill_rollout is not None else None)
    last = options.warm_up + options.steps
    progress = time.monotonic()
    while len(seen.rows) < last:
        time.sleep(POLL_S)
        new = {row.step: row.values for row in client.metrics(job_id) if "timing_s/step" in row.values}
        for step in sorted(new.keys() - seen.rows.keys()):
            progress = time.monotonic()
            seen.rows[step] = new[step]
            print(f"step {step}: {new[step].get('timing_s/step'):.1f} s", file=sys.stderr, flush=True)
            if step + 1 in (options.warm_up, last):
                seen.marks.append((progress, busy_seconds(stack)))
        if (found := client.job(job_id)).ended or found.status == "paused":
            raise RuntimeError(f"the job is {found.status}: {found.reason}")
        if time.monotonic() - progress > STEP_LIMIT_S:
            raise TimeoutError(f"no step in {STEP_LIMIT_S:.0f} s")
        if seen.kill is not None:
            _kill(seen.kill, stack, len(seen.rows))
    return seen


def _kill(kill: Kill, stack: Stack, steps_done: int) -> None:
    """Once: SIGKILL for the last rollout when its step is due; then notes when the restarted one serves a version."""
    name = max(name for name in stack.processes if name.startswith("rollout-"))
    if not kill.at and steps_done >= kill.step:
        current = StateDir(Path(stack.state_dir)).read()
        assert current is not None
        kill.version = max(1, policy_version(_metrics(stack, name)))
        kill.at = time.monotonic()
        os.kill(current.processes[name].pid, signal.SIGKILL)
        print(f"killed {name}", file=sys.stderr, flush=True)
    elif kill.at and kill.back_after_s is None and policy_version(_metrics(stack, name)) >= kill.version:
        kill.back_after_s = time.monotonic() - kill.at
        print(f"{name} serves again after {kill.back_after_s:.1f} s", file=sys.stderr, flush=True)


def busy_seconds(stack: Stack) -> dict[str, float]:
    """Busy seconds of each rollout's accelerator so far."""
    return {name: rollout_busy_s(_metrics(stack, name)) for name in stack.processes if name.startswith("rollout-")}


def _metrics(stack: Stack, name: str) -> str:
    """The text of a process's Prometheus endpoint; empty while it is unreachable."""
    try:
        with urllib.request.urlopen(f"http://{stack.processes[name].metrics}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def gpus(options: argparse.Namespace) -> int:
    return int(options.rollouts + options.trainers)


def ends_of_logs(state: StateDir, size: int = 3000) -> str:
    logs = sorted(state.logs.glob("*")) if state.logs.exists() else []
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-size:]}" for log in logs)


def keep_logs(state: StateDir, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for log in state.logs.glob("*"):
        (directory / log.name).write_bytes(log.read_bytes())


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("model", "logs")}


def summary(figures: Mapping[str, Any]) -> str:
    """Formats the figures as a table."""
    lines = []
    for title in ("services", "one_process"):
        if title not in figures:
            continue
        found = figures[title]
        lines.append(f"{title}: {found['images_per_gpu_s']:.3f} images/GPU/s, {found['step_s']:.2f} s a step")
        lines.append("  steps " + " ".join(f"{step:.1f}" for step in found["step_s_each"]))
        lines.append("  seconds " + ", ".join(f"{name} {value:.2f}" for name, value in found["seconds"].items()))
        lines.append(
            f"  idle: rollouts {_share(found['rollout_idle'])}, trainer {_share(found['trainer_idle'])}; "
            f"overlap {_share(found['overlap'])}; published {found['published']}; {found['others']}"
        )
        if "kill" in found:
            lines.append(f"  kill: {found['kill']}")
    if "ratio" in figures:
        lines.append(f"services / one process: {figures['ratio']:.3f}")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder of bench.speed.full_size (made)")
    parser.add_argument("--tiny", action="store_true", help="tiny model, 64 by 64 pixels, float32 but for fp8")
    parser.add_argument("--mode", choices=("lora", "full"), default="lora")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--samples", choices=("no", "idle", "only"), default="no", help="trainer.samples")
    parser.add_argument("--engine", choices=("diffusers", "vllm-omni"), default="diffusers")
    parser.add_argument("--reward", default="ocr", help="scorer of the only reward (ocr)")
    parser.add_argument("--images", type=int, default=128, help="a step (128)")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one forward of a rollout (16)")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of one forward of a trainer rank (8)")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates a step (2)")
    parser.add_argument("--old-log-probs", choices=("first_forward", "rollout"), default="first_forward")
    parser.add_argument("--steps", type=int, default=4, help="measured (4)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those (2)")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--trainer-quantization", choices=("none", "fp8"), default="none", help="with --mode full")
    parser.add_argument("--base", choices=("plain", "fp8"), default="plain", help="model.base")
    parser.add_argument("--adapter", choices=("separate", "merged"), default="separate", help="rollout.adapter")
    parser.add_argument("--tail-steps", type=int, default=0, help="of MixGRPO-Flash, after the window (none)")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--optimizer-state", choices=("device", "host", "8bit"), default="device")
    parser.add_argument("--kill-rollout", type=int, metavar="STEP", help="SIGKILL one after this measured step")
    parser.add_argument("--compare", action="store_true", help="one rollout, one trainer rank, diffusers engine")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
