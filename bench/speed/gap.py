"""How far are a rollout's log-probs from the trainer's, by how the rollout computes?

    python -m bench.speed.gap --model DIRECTORY
        [--variants eager,compiled,fp8,vllm-omni,vllm-omni-compiled,vllm-omni-fp8]
        [--trainers eager,compiled] [--base fp8] [--lora-rank 64 --lora-std 1e-3]
        [--images 32] [--batch 16] [--micro-batch 8] [--guidance 4] [--json FILE]
    python -m bench.speed.gap --base fp8 --lora-rank 64 --variants eager,compiled,merged,compiled-merged
    python -m bench.speed.gap --tiny --variants eager --trainers eager
    FLOWFLEET_FP8_MIN_SIZE=16 python -m bench.speed.gap --tiny --base fp8 --lora-rank 4 --variants eager,merged

Each variant of the rollout engine samples from the same prompts and seeds; then the trainer's forward, the adapter's
velocity in the model's dtype and the same reverse step, evaluates each stored step. The gap is |the trainer's - the
rollout's log-prob|, a mean over a sample's elements as everywhere; `clip` is the share of rows whose ratio would be
clipped by it. Rollouts run in batches of `--batch`, the trainer in its own of `--micro-batch`, each in a process of its
own. Weights are random, so the figures are those of the arithmetic, not of a trained model.

`--base fp8` is `model.base` of both sides. `--lora-rank` gives both the same adapter on the family's targets, of
factors drawn with `--lora-std`; variants named merged round it into the weights (`rollout.adapter`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.speed.adapters import adapter_state, lora_spec
from bench.speed.full_size import PROMPTS, write_checkpoint
from flowfleet.algorithms.correction import agreement_metrics
from flowfleet.algorithms.losses import Limits
from flowfleet.algorithms.sde import reverse_step
from flowfleet.data.trajectories import Trajectory
from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.process.telemetry import LOG_PROB_GAP
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.weights import lora
from flowfleet.weights.weights import dtype_of
from services.rollout.__main__ import parser as rollout_parser
from services.rollout.engines.acceleration import accelerate
from services.rollout.engines.base import GeneratedBatch, GenerationRequest, Noise, PromptGroup, RolloutEngine, Sampling
from services.rollout.process import make_engine

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("diffusers", {}),
    "compiled": ("diffusers", {"compile": True}),
    "fp8": ("diffusers", {"compile": True, "quantization": "fp8"}),
    "merged": ("diffusers", {"merged": True}),
    "compiled-merged": ("diffusers", {"compile": True, "merged": True}),
    "vllm-omni": ("vllm-omni", {}),
    "vllm-omni-compiled": ("vllm-omni", {"compile": True}),
    "vllm-omni-fp8": ("vllm-omni", {"compile": True, "quantization": "fp8"}),
    "vllm-omni-merged": ("vllm-omni", {"compile": True, "merged": True}),
}
"""Name to the engine, what its ModelSpec says, and whether the adapter is merged."""
STEP_TYPE, ETA, WINDOW = "sde", 1.2, (0, 1)


def main() -> int:
    options = parser().parse_args()
    if options.tiny:
        dtype = "float32" if options.base == "plain" and not options.lora_rank else "bfloat16"
        options.steps, options.size, options.dtype = min(options.steps, 3), 64, dtype
    if options.stage == "sample":
        asyncio.run(sample(options))
    elif options.stage == "evaluate":
        print(json.dumps(evaluate(options)))
    else:
        compare(options)
    return 0


def compare(options: argparse.Namespace) -> None:
    """Every variant against every trainer, a line each, and all of it as a table."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-gap-") as scratch:
        if options.model is None:
            options.model = write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
        for variant in options.variants.split(","):
            if variant not in VARIANTS:
                raise ValueError(f"--variants {variant}: give some of {', '.join(VARIANTS)}")
            options.samples = Path(scratch) / f"{variant}.safetensors"
            in_child(options, "sample", variant)
            for trainer in options.trainers.split(","):
                figures = json.loads(in_child(options, "evaluate", trainer).splitlines()[-1])
                rows.append({"bench": "gap", "rollout": variant, "trainer": trainer, **settings(options), **figures})
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


def in_child(options: argparse.Namespace, stage: str, name: str) -> str:
    """What a stage prints, run in a process of its own, whose memory is free afterwards."""
    given = settings(options) | {"model": options.model, "samples": options.samples, "device": options.device}
    argv = [sys.executable, "-m", "bench.speed.gap", "--stage", stage, "--name", name]
    for option, value in given.items():
        argv += [f"--{option.replace('_', '-')}", str(value)]
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.decode()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    names = [
        "images",
        "batch",
        "micro_batch",
        "steps",
        "size",
        "guidance",
        "dtype",
        "clip",
        "base",
        "lora_rank",
        "lora_std",
    ]
    return {name: getattr(options, name) for name in names}


# The rollout ---------------------------------------------------------------------------------------------------------


async def sample(options: argparse.Namespace) -> None:
    """Samples with the variant `options.name` into the file `options.samples`."""
    name, variant = VARIANTS[options.name]
    acceleration = {key: value for key, value in variant.items() if key != "merged"}
    if options.base == "fp8":
        acceleration["quantization"] = "fp8_base"
    flags = ["--engine", name, "--device", options.device, "--max-batch", str(options.batch)]
    engine = make_engine(rollout_parser().parse_args(flags))
    try:
        model = ModelSpec(path=str(options.model.resolve()), dtype=options.dtype, load_format="dummy", **acceleration)
        if options.lora_rank:
            await engine.prepare(model, lora_spec(options, merged="merged" in variant))
            await engine.load_adapter(adapter_state(options))
        else:
            await engine.prepare(model, None)
        save_file(stored(await sampled(engine, request(options))), options.samples)
    finally:
        await engine.close()


async def sampled(engine: RolloutEngine, wanted: GenerationRequest) -> list[GeneratedBatch]:
    return [batch async for batch in engine.generate(wanted, lambda: False)]


def request(options: argparse.Namespace) -> GenerationRequest:
    """Groups of `batch` samples, so that no batch has padding."""
    prompts = (options.model / PROMPTS).read_text().splitlines()
    indices = tuple(range(options.batch))
    groups = tuple(
        PromptGroup(group, prompts[group], indices, tuple(1000 * group + index for index in indices))
        for group in range(max(1, options.images // options.batch))
    )
    sampling = Sampling(
        Size(options.size, options.size),
        options.steps,
        Guidance(options.guidance),
        " " if options.guidance > 1 else "",
    )
    return GenerationRequest(groups, sampling, Noise(STEP_TYPE, ETA, WINDOW), "steps")


def stored(batches: list[GeneratedBatch]) -> dict[str, Tensor]:
    """What a trainer is given, by name; rows in order."""
    samples = [sample for batch in batches for sample in batch.samples]
    paths = [sample.record for sample in samples if isinstance(sample.record, Trajectory)]
    tensors = {
        "groups": torch.tensor([sample.group for sample in samples]),
        "latents": torch.stack([path.latents for path in paths], 1),
        "next_latents": torch.stack([path.next_latents for path in paths], 1),
        "log_probs": torch.stack([path.log_probs for path in paths], 1),
    }
    for batch in batches:
        tensors |= {f"embeds.{group}": prompt.embeds for group, prompt in batch.embeds.items()}
        for negative in batch.negative.values():
            tensors["negative"] = negative.embeds
    return tensors


# The trainer ---------------------------------------------------------------------------------------------------------


def evaluate(options: argparse.Namespace) -> dict[str, float]:
    """The gap of the stored samples to the trainer `options.name`, eager or compiled."""
    device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    adapter = adapter_for(options.model).load(
        options.model,
        dtype=dtype_of(options.dtype),
        device=device,
        components=("transformer",),
        load_format="dummy",
    )
    accelerate(
        adapter.experts,
        compile=options.name == "compiled",
        quantization="fp8_base" if options.base == "fp8" else "none",
    )
    if options.lora_rank:
        lora.install_lora(adapter.experts, lora_spec(options))
        lora.load_adapter(adapter.experts, adapter_state(options))
    samples = load_file(options.samples, device=str(device))
    gaps = [gap.flatten().cpu() for gap in log_prob_gaps(adapter, samples, options)]
    metrics = agreement_metrics(torch.cat(gaps), Limits(options.clip, kl_threshold=math.inf))
    return {
        "mean": metrics[LOG_PROB_GAP],
        "p99": metrics["rollout_corr/log_ratio_abs_p99"],
        "max": metrics["rollout_corr/log_ratio_abs_max"],
        "beyond_clip": metrics["rollout_corr/beyond_clip"],
        "exact": metrics["rollout_corr/exact"],
        "rows": float(sum(map(len, gaps))),
    }


@torch.no_grad()
def log_prob_gaps(adapter: ModelAdapter, samples: dict[str, Tensor], options: argparse.Namespace) -> Iterator[Tensor]:
    """The trainer's log-prob less the rollout's, (B,) for each micro-batch and noisy step."""
    size = Size(options.size, options.size)
    schedule = adapter.schedule(options.steps, size)
    negative = unpadded(samples["negative"]) if "negative" in samples else None
    for rows in torch.split(torch.arange(len(samples["groups"])), options.micro_batch):
        groups = samples["groups"][rows].tolist()
        prompts = concat_embeds([unpadded(samples[f"embeds.{group}"]) for group in groups])
        for k, step in enumerate(WINDOW):
            latents = samples["latents"][k, rows]
            velocity = adapter.velocity(
                latents,
                schedule.timesteps[step],
                prompts,
                size=size,
                guidance=Guidance(options.guidance),
                negative=negative,
            )
            result = reverse_step(STEP_TYPE)(
                latents,
                velocity,
                schedule.sigmas[step],
                schedule.sigmas[step + 1],
                eta=ETA,
                sigma_max=schedule.sigma_max,
                prev_sample=samples["next_latents"][k, rows],
            )
            yield result.log_prob - samples["log_probs"][k, rows]


def unpadded(embeds: Tensor) -> PromptEmbeds:
    return PromptEmbeds(embeds, torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device), {}, False)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| rollout | trainer | mean | p99 | max | beyond clip | exact |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        figures = [f"{row[name]:.2e}" for name in ("mean", "p99", "max")]
        figures += [f"{row[name]:.1%}" for name in ("beyond_clip", "exact")]
        lines.append(f"| {row['rollout']} | {row['trainer']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench.speed.gap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", type=Path, help="a folder of bench.speed.full_size (made)")
    flags.add_argument("--tiny", action="store_true", help="tiny model, 64 by 64 pixels, 3 steps")
    flags.add_argument("--variants", default="eager,compiled,fp8")
    flags.add_argument("--trainers", default="eager,compiled")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--images", type=int, default=32)
    flags.add_argument("--batch", type=int, default=16, help="rows of a rollout's forward (16)")
    flags.add_argument("--micro-batch", type=int, default=8, help="rows of a trainer's forward (8)")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--size", type=int, default=512, help="height and width (512)")
    flags.add_argument("--guidance", type=float, default=1.0)
    flags.add_argument("--clip", type=float, default=1e-5, help="clip range of the ratio (1e-5)")
    flags.add_argument("--base", choices=("plain", "fp8"), default="plain", help="model.base")
    flags.add_argument("--lora-rank", type=int, default=0, help="adapt the family's linears with this rank (none)")
    flags.add_argument("--lora-std", type=float, default=1e-3, help="of the adapter's factors (1e-3)")
    flags.add_argument("--json", type=Path, help="write the rows here as well")
    flags.add_argument("--stage", choices=("sample", "evaluate"), help=argparse.SUPPRESS)
    flags.add_argument("--name", help=argparse.SUPPRESS)
    flags.add_argument("--samples", type=Path, help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    sys.exit(main())
