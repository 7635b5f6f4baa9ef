"""Runs a whole job as services on this machine's accelerators: images per second and GPU, and which side waits.

    python -m bench.loop --mode lora --rollouts 1 --trainers 1 --images 128 --steps 4 [--guidance 4] [--compile]
    python -m bench.loop --samples only --rollouts 0 --max-staleness 0 …    the trainer samples for itself
    python -m bench.loop --compare …      then runs the same functions in one process on the same accelerators
    python -m bench.loop --tiny --images 8 --group-size 4 --batch-size 4 --micro-batch 4 --steps 1 --warm-up 1

The model is Qwen-Image at full size with random weights (`recipes.full_size`), 512², 10 steps, a window of 2. Rollouts
take the first of the visible accelerators, trainer ranks the next ones. Samples are up to one version stale, so
sampling and training overlap. Random weights draw noise without words: rewards are equal and gradients zero, but every
phase does all of its work. Steps before `--warm-up` compile and are left out. The job is cancelled after the last
measured step.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.replica import exposition, seconds_by_part
from flowfleet.client.client import Client
from flowfleet.job.files import data_folders
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.local.plan import StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack
from flowfleet.local.stack import Stack, StateDir
from recipes.full_size.make_model import PROMPTS, write_checkpoint

MORE_STEPS = 20
"""More than are measured: the job is cancelled before its last, so that it writes no checkpoint."""
POLL_S = 0.2
STEP_LIMIT_S = 900.0
"""Longest wait for one step."""
BUSY_PARTS = ("encode", "denoise", "decode")
"""Parts of `flowfleet_rollout_seconds_total` that hold the accelerator; publishing overlaps the next batch."""
TRAINER_PHASES = ("load_samples", "ref", "old_log_prob", "old_policy", "update_actor")
"""Metrics `timing_s/…` inside the trainer."""
PHASES = (*TRAINER_PHASES, "reward", "adv", "gen", "update_weights")
"""Phases that are reported."""

_FIGURES = ("images_per_gpu_s", "step_s", "rollout_idle", "trainer_idle", "seconds.update_weights")
SERVICES = [f"services.{name}" for name in _FIGURES]
ONE_PROCESS = ["one_process.images_per_gpu_s", "one_process.step_s", "ratio"]
"""Columns of the table."""

Row = Mapping[str, float | None]


@dataclass
class Watched:
    """Observations of a job: rows by step, and the rollouts' busy seconds when the warm-up and the last step ended."""

    rows: dict[int, Row] = field(default_factory=dict)
    marks: list[tuple[float, dict[str, float]]] = field(default_factory=list)


def main() -> int:
    options = flags().parse_args()
    with tempfile.TemporaryDirectory(prefix="loop-") as scratch:
        model = options.model or write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
        spec = parse_job(job(options, model))
        settings = {name: value for name, value in vars(options).items() if name not in ("model", "json")}
        figures: dict[str, Any] = {"bench": "loop", "settings": settings}
        figures["services"] = run_as_services(options, spec, Path(scratch) / "stack")
        if options.compare:
            from tests.monolith import run_in_one_process  # torch only now: a forked stack needs none of it

            rows = run_in_one_process(spec, options.warm_up + options.steps)[options.warm_up :]
            figures["one_process"] = loop_figures(rows, spec.samples_per_step, 2, {}, 1.0)
            figures["ratio"] = figures["services"]["images_per_s"] / figures["one_process"]["images_per_s"]
    columns = [*SERVICES, *ONE_PROCESS] if options.compare else SERVICES
    report.finish("loop", options, [figures], columns)
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
        "noise": {"type": "sde", "eta": 1.2},
        "window": {"strategy": "random", "size": 2, "low": 0, "high": 5},
    }
    if options.tail_steps:
        rollout["tail_steps"] = options.tail_steps
    steps = options.warm_up + options.steps + MORE_STEPS
    trainer = {
        "mode": options.mode,
        "world_size": options.trainers,
        "updates_per_step": 2,
        "micro_batch_size": options.micro_batch,
        "gradient_checkpointing": options.checkpointing,
        "offload": options.offload,
        "quantization": options.trainer_quantization,
        "compile": options.compile,
        "samples": options.samples,
        "optimizer": {"lr": 3e-4 if options.mode == "lora" else 3e-5, "state": options.optimizer_state},
    }
    size = {"height": 64, "width": 64} if options.tiny else {"height": options.size, "width": options.size}
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
        "schedule": {"steps": steps, "save_every": steps, "max_staleness": options.max_staleness},
    }


def run_as_services(options: argparse.Namespace, spec: JobSpec, state_dir: Path) -> dict[str, Any]:
    """Figures of the measured steps. Raises RuntimeError with the ends of the logs where the job failed."""
    count = options.rollouts
    stack_options = StackOptions(
        state_dir=state_dir,
        port=0,
        data_roots=data_folders(spec),
        pools=(Pool(replicas=count, engine=options.engine, max_batch=options.batch_size),) if count else (),
        rewards=(options.reward,),
    )
    with local_stack(stack_options) as stack, Client(stack.url) as client:
        submitted = client.submit(spec)
        try:
            seen = watch(client, submitted.id, stack, options)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{error}\n{ends_of_logs(StateDir(state_dir))}") from None
        client.cancel(submitted.id)
    (start, before), (end, after) = seen.marks
    busy = {name: after[name] - before.get(name, 0.0) for name in after}
    rows = [seen.rows[step] for step in sorted(seen.rows) if step >= options.warm_up][: options.steps]
    return loop_figures(rows, spec.samples_per_step, options.rollouts + options.trainers, busy, end - start)


def watch(client: Client, job_id: str, stack: Stack, options: argparse.Namespace) -> Watched:
    """Waits for the last measured step. Raises RuntimeError if the job ends first, TimeoutError if a step takes too
    long."""
    seen = Watched()
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
    return seen


def busy_seconds(stack: Stack) -> dict[str, float]:
    """Busy seconds of each reachable rollout's accelerator so far."""
    found = {}
    for name in stack.processes:
        if name.startswith("rollout-"):
            with suppress(OSError):
                parts = seconds_by_part(exposition(f"http://{stack.processes[name].metrics}/metrics"))
                found[name] = sum(parts.get(part, 0.0) for part in BUSY_PARTS)
    return found


def ends_of_logs(state: StateDir, size: int = 3000) -> str:
    return "\n".join(f"== {it.name}\n{it.read_text(errors='replace')[-size:]}" for it in sorted(state.logs.glob("*")))


def loop_figures(
    rows: Sequence[Row], images: int, gpus: int, busy: Mapping[str, float], window_s: float
) -> dict[str, Any]:
    """Computes the figures of measured steps, given in order.

    Args:
        rows: metrics of the steps.
        images: trained on in each step.
        gpus: accelerators in all, a reward's too.
        busy: seconds of each rollout's accelerator inside the window, by replica; empty where that is not known.
        window_s: wall time of the window.
    """
    steps = [_value(row, "timing_s/step") for row in rows]
    seconds = statistics.fmean(steps)
    trainer_s = statistics.fmean(sum(_value(row, f"timing_s/{phase}") for phase in TRAINER_PHASES) for row in rows)
    rollout_s = statistics.fmean(busy.values()) * seconds / window_s if busy else 0.0
    return {
        "images_per_gpu_s": images / seconds / gpus,
        "images_per_s": images / seconds,
        "step_s": seconds,
        "step_s_each": [round(step, 3) for step in steps],
        "rollout_idle": max(0.0, 1.0 - rollout_s / seconds) if busy else None,
        "trainer_idle": 1.0 - trainer_s / seconds,
        "seconds": {phase: statistics.fmean(_value(row, f"timing_s/{phase}") for row in rows) for phase in PHASES},
        "others": {
            name: statistics.fmean(_value(row, name) for row in rows)
            for name in sorted(rows[0])
            if name.startswith(("perf/mfu", "perf/peak", "rollout_corr/", "actor/grad_norm", "actor/loss"))
            and all(row.get(name) is not None for row in rows)
        },
    }


def _value(row: Row, name: str) -> float:
    """0 where the step had no such phase."""
    return row.get(name) or 0.0


def flags() -> argparse.ArgumentParser:
    parser = report.parser("loop", __doc__)
    parser.add_argument("--model", type=Path, help="a folder of recipes.full_size.make_model (made)")
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
    parser.add_argument("--old-log-probs", choices=("first_forward", "rollout"), default="first_forward")
    parser.add_argument("--size", type=int, default=512, help="pixels of a side (512)")
    parser.add_argument("--steps", type=int, default=4, help="measured (4)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those (2)")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--trainer-quantization", choices=("none", "fp8"), default="none", help="with --mode full")
    parser.add_argument("--base", choices=("plain", "fp8"), default="plain", help="model.base")
    parser.add_argument("--tail-steps", type=int, default=0, help="of MixGRPO-Flash, after the window (none)")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--offload", choices=("none", "optimizer", "activations", "auto"), default="none")
    parser.add_argument("--optimizer-state", choices=("device", "host", "8bit"), default="device")
    parser.add_argument("--compare", action="store_true", help="one rollout, one trainer rank, diffusers engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
