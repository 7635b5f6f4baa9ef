"""Measures how fast, and in how much memory, the trainer updates a model of Qwen-Image's real size or of a checkpoint.

    python -m bench.train [--mode lora|full] [--batch 8] [--checkpointing none|selective|full] …
    torchrun --nproc-per-node N -m bench.train …
    python -m bench.train --tiny --layers 1 --size 64 --batch 2

It runs the trainer's own engine and update on dummy weights and made-up samples: micro-batches of `--batch` rows, their
window of noisy steps, then the optimizer; old log-probs come from the first forward. Rank 0 reports images per second
and rank, milliseconds of forward and backward per window step and image, MFU, the optimizer's milliseconds, and GiB.
Where memory does not suffice, the report says so.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import report
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.planning.flops import model_flops
from flowfleet.process.telemetry import Timings
from recipes.full_size.make_model import write_checkpoint
from services.trainer.model.engine import Engine
from services.trainer.optim.adamw import UpdateOutcome
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.batches import MicroBatch, Update
from services.trainer.step.inputs import StepsBatch
from services.trainer.step.update import StepTrainer

_GIB = 2**30
_FIGURES = ["images_per_s_and_rank", "ms_per_row", "optimizer_ms", "mfu", "peak_gib"]
COLUMNS = {
    False: ["world_size", "mode", "batch", *_FIGURES],
    True: ["rank", "mode", "batch", "out_of_memory", "peak_gib"],
}
"""Columns of the table, by whether memory did not suffice."""


def main() -> None:
    options = flags().parse_args()
    ranks = Ranks()
    row: dict[str, Any] = {"bench": "train", "world_size": ranks.world_size}
    row |= {name: value for name, value in vars(options).items() if value is not None and name != "json"}
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            path = write_checkpoint(Path(folder), num_layers=options.layers, tiny=options.tiny)
        else:
            path = Path(options.model)
        spec = bench_job(path, options, ranks.world_size)
        try:
            row |= measure(spec, options, ranks)
        except torch.OutOfMemoryError as error:
            row |= {"out_of_memory": str(error).splitlines()[0]}
    row["peak_gib"] = round(devices.peak_memory_bytes(ranks.device) / _GIB, 2)
    failed = "out_of_memory" in row
    if ranks.rank == 0 or failed:
        report.finish("train", options, [row | {"rank": ranks.rank}], COLUMNS[failed])
    if failed:
        os._exit(0 if ranks.world_size == 1 else 1)  # others may wait for this rank: torchrun ends them
    ranks.close()


def bench_job(path: Path, options: argparse.Namespace, world_size: int) -> JobSpec:
    """Flow-GRPO without guidance, as in the recipes for this model."""
    return parse_job(
        {
            "model": {"path": str(path), "dtype": "bfloat16", "load_format": "dummy", "base": options.base},
            "data": {"train": "unused.txt"},
            "rewards": {"ocr": {}},
            "rollout": {
                "height": options.size,
                "width": options.size,
                "window": {"strategy": "fixed", "size": options.window, "low": 0},
            },
            "trainer": {
                "mode": options.mode,
                "world_size": world_size,
                "micro_batch_size": options.batch,
                "gradient_checkpointing": options.checkpointing,
                "offload": options.offload,
                "compile": options.compile,
                "deterministic": options.deterministic,
                "quantization": options.quantization,
                "optimizer": {"state": options.state, "lr": 1e-5},
            },
        }
    )


def measure(spec: JobSpec, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Medians over the steps after the warm-up, of which the first may compile."""
    start = time.perf_counter()
    engine = Engine(spec, ranks)
    engine.shard()
    devices.synchronize(ranks.device)
    loaded = time.perf_counter() - start
    notes = _noting_optimizer(engine)
    seconds = [_step(engine, options, number) for number in range(options.warm_up + options.steps)]
    images = options.batch * options.micro_batches
    update = statistics.median(seconds[options.warm_up :])
    last = statistics.median(note[0] for note in notes[options.warm_up :])
    rows = images * options.window
    flops = rows * model_flops(spec).training(options.text)
    peak = devices.peak_flops(ranks.device)
    return {
        "load_s": round(loaded, 2),
        "first_step_s": round(seconds[0], 2),
        "update_s": round(update, 4),
        "images_per_s_and_rank": round(images / update, 3),
        "ms_per_row": round((update - last) / rows * 1e3, 2),
        "optimizer_ms": round(last * 1e3, 1),
        "mfu": round(flops / update / peak, 4) if peak else None,
        "grad_norm": notes[-1][1],
    }


def _noting_optimizer(engine: Engine) -> list[tuple[float, float]]:
    """Lets the engine's optimizer note seconds and gradient norm of each of its steps."""
    inner = engine.optimizer.step
    notes: list[tuple[float, float]] = []

    def step(lr: float, loss_scale: float = 1.0) -> UpdateOutcome:
        devices.synchronize(engine.ranks.device)
        start = time.perf_counter()
        outcome = inner(lr, loss_scale)
        devices.synchronize(engine.ranks.device)
        notes.append((time.perf_counter() - start, outcome.grad_norm))
        return outcome

    engine.optimizer.step = step  # type: ignore[method-assign]
    return notes


def _step(engine: Engine, options: argparse.Namespace, number: int) -> float:
    """Seconds of one update of `micro_batches` micro-batches."""
    ranks = engine.ranks
    images = options.batch * options.micro_batches
    first = ranks.rank * images
    starts = range(first, first + images, options.batch)
    micro = tuple(MicroBatch(tuple(range(start, start + options.batch))) for start in starts)
    num_samples = images * ranks.world_size
    batches = [_batch(engine, options, part) for part in micro]
    trainer = StepTrainer(engine, number, num_samples, list(range(options.window)))
    devices.synchronize(ranks.device)
    start = time.perf_counter()
    trainer.train([([Update(num_samples, (micro,) * ranks.world_size)], [batches])], Timings())
    devices.synchronize(ranks.device)
    return time.perf_counter() - start


def _batch(engine: Engine, options: argparse.Namespace, micro: MicroBatch) -> StepsBatch:
    """Noise in the shapes of real samples."""
    device, shape = engine.ranks.device, engine.adapter.latent_shape(engine.spec.rollout.size)
    steps = (options.window, options.batch, *shape)
    width = engine.adapter.transformer.config.joint_attention_dim
    embeds = torch.randn(options.batch, options.text, width, device=device, dtype=engine.dtype)
    return StepsBatch(
        rows=micro.rows,
        is_padding=False,
        size=engine.spec.rollout.size,
        advantages=torch.randn(options.batch, device=device),
        ties=torch.ones(options.batch, device=device),
        prompts=PromptEmbeds.whole(embeds),
        negative=None,
        latents=torch.randn(steps, device=device),
        next_latents=torch.randn(steps, device=device),
        rollout_log_probs=torch.zeros(steps[:2], device=device),
    )


def flags() -> argparse.ArgumentParser:
    parser = report.parser("train", __doc__)
    parser.add_argument("--mode", choices=("lora", "full"), default="lora")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch (8)")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an update and rank (1)")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--offload", choices=("none", "optimizer", "activations", "auto"), default="none")
    parser.add_argument("--base", choices=("plain", "fp8"), default="plain")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none", help="with --mode full")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--state", choices=("device", "host", "8bit"), default="device", help="of the optimizer")
    parser.add_argument("--window", type=int, default=2, help="noisy steps of a sample (2)")
    parser.add_argument("--text", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--size", type=int, default=512, help="pixels of a side (512)")
    parser.add_argument("--layers", type=int, help="transformer blocks (60)")
    parser.add_argument("--model", metavar="FOLDER", help="a checkpoint whose shapes are taken instead")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="measured updates (4)")
    return parser


if __name__ == "__main__":
    main()
