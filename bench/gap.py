"""Measures how far a rollout's log-probs are from the trainer's, by how the rollout computes.

    python -m bench.gap [--variants eager,compiled,fp8,vllm-omni,vllm-omni-compiled,vllm-omni-fp8]
        [--trainers eager,compiled] [--base fp8] [--lora-rank 64] [--guidance 4]
    python -m bench.gap --tiny --variants eager --trainers eager --images 2 --batch 2 --micro-batch 2
    FLOWFLEET_FP8_MIN_SIZE=16 python -m bench.gap --tiny --base fp8 --lora-rank 4 --variants eager,merged

Each variant of the rollout engine samples from the same prompts and seeds. Then the trainer's forward, which is the
adapter's velocity in the model's dtype and the same reverse step, evaluates each stored step. The gap is the absolute
difference of the two log-probs, each a mean over a sample's elements; `beyond_clip` is the share of rows whose ratio it
would clip. Each side runs in a process of its own. Weights are random, so the figures are those of the arithmetic.

`--base fp8` is `model.base` of both sides. `--lora-rank` gives both the same adapter on the family's targets, of
random factors; variants named merged round it into the weights (`rollout.adapter`).
"""

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import report
from bench.replica import lora_spec, random_adapter
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
from recipes.full_size.make_model import PROMPTS, write_checkpoint
from services.rollout.__main__ import parser as rollout_parser
from services.rollout.engines.acceleration import accelerate
from services.rollout.engines.base import GeneratedBatch, GenerationRequest, Noise, PromptGroup, RolloutEngine, Sampling
from services.rollout.process import make_engine

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("diffusers", {}),
    "compiled": ("diffusers", {"compile": True}),
    "fp8": ("diffusers", {"compile": True, "quantization": "fp8"}),
    "merged": ("diffusers", {"merged": True}),
    "vllm-omni": ("vllm-omni", {}),
    "vllm-omni-compiled": ("vllm-omni", {"compile": True}),
    "vllm-omni-fp8": ("vllm-omni", {"compile": True, "quantization": "fp8"}),
}
"""Name to the engine, what its ModelSpec says, and whether the adapter is merged."""
CLIP, LORA_STD = 1e-5, 1e-3
AGREEMENT = {
    "mean": LOG_PROB_GAP,
    "p99": "rollout_corr/log_ratio_abs_p99",
    "max": "rollout_corr/log_ratio_abs_max",
    "beyond_clip": "rollout_corr/beyond_clip",
    "exact": "rollout_corr/exact",
}
"""Figures by the name of the trainer's metric."""
STEP_TYPE, ETA, WINDOW = "sde", 1.2, (0, 1)
SETTINGS: tuple[str, ...] = (
    "images",
    "batch",
    "micro_batch",
    "steps",
    "size",
    "guidance",
    "dtype",
    "base",
    "lora_rank",
)


def main() -> int:
    options = parser().parse_args()
    if options.tiny:
        dtype = "float32" if options.base == "plain" and not options.lora_rank else "bfloat16"
        options.steps, options.size, options.dtype = min(options.steps, 3), 64, dtype
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-gap-") as scratch:
        if options.model is None:
            options.model = write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
        for variant in options.variants.split(","):
            if variant not in VARIANTS:
                raise ValueError(f"--variants {variant}: give some of {', '.join(VARIANTS)}")
            samples = Path(scratch) / f"{variant}.safetensors"
            report.in_child(sample, options, variant, samples)
            for trainer in options.trainers.split(","):
                settings = {name: getattr(options, name) for name in SETTINGS}
                figures = report.in_child(evaluate, options, trainer, samples)
                rows.append({"bench": "gap", "rollout": variant, "trainer": trainer, **settings, **figures})
    report.finish("gap", options, rows, ["rollout", "trainer", "mean", "p99", "max", "beyond_clip", "exact"])
    return 0


def adapter_state(options: argparse.Namespace) -> dict[str, Tensor]:
    """Random factors by published name, the same on both sides."""
    model = ModelSpec(path=str(options.model), dtype=options.dtype)
    return random_adapter(model, lora_spec(options.model, options.lora_rank), LORA_STD)


# The rollout ---------------------------------------------------------------------------------------------------------


def sample(options: argparse.Namespace, variant: str, samples: Path) -> None:
    """Samples with a variant of the rollout engine into a file."""
    asyncio.run(_sample(options, *VARIANTS[variant], samples))


async def _sample(options: argparse.Namespace, name: str, variant: dict[str, Any], samples: Path) -> None:
    acceleration = {key: value for key, value in variant.items() if key != "merged"}
    if options.base == "fp8":
        acceleration["quantization"] = "fp8_base"
    flags = ["--engine", name, "--device", options.device, "--max-batch", str(options.batch)]
    engine = make_engine(rollout_parser().parse_args(flags))
    try:
        model = ModelSpec(path=str(options.model.resolve()), dtype=options.dtype, load_format="dummy", **acceleration)
        if options.lora_rank:
            await engine.prepare(model, lora_spec(options.model, options.lora_rank, merged="merged" in variant))
            await engine.load_adapter(adapter_state(options))
        else:
            await engine.prepare(model, None)
        save_file(stored(await sampled(engine, request(options))), samples)
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
    size, negative = Size(options.size, options.size), " " if options.guidance > 1 else ""
    sampling = Sampling(size, options.steps, Guidance(options.guidance), negative)
    return GenerationRequest(groups, sampling, Noise(STEP_TYPE, ETA, WINDOW), "steps")


def stored(batches: list[GeneratedBatch]) -> dict[str, Tensor]:
    """Returns the tensors that a trainer gets, by name; rows in order."""
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


def evaluate(options: argparse.Namespace, trainer: str, stored: Path) -> dict[str, float]:
    """Returns the gap of stored samples to the trainer, eager or compiled."""
    device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    adapter = adapter_for(options.model).load(
        options.model, dtype=dtype_of(options.dtype), device=device, components=("transformer",), load_format="dummy"
    )
    quantization = "fp8_base" if options.base == "fp8" else "none"
    accelerate(adapter.experts, compile=trainer == "compiled", quantization=quantization)
    if options.lora_rank:
        lora.install_lora(adapter.experts, lora_spec(options.model, options.lora_rank))
        lora.load_adapter(adapter.experts, adapter_state(options))
    samples = load_file(stored, device=str(device))
    gaps = [gap.flatten().cpu() for gap in log_prob_gaps(adapter, samples, options)]
    return {**agreement(torch.cat(gaps), Limits(CLIP, kl_threshold=math.inf)), "rows": float(sum(map(len, gaps)))}


def agreement(log_ratios: Tensor, limits: Limits) -> dict[str, float]:
    """Figures of differences between log-probs."""
    metrics = agreement_metrics(log_ratios, limits)
    return {name: metrics[metric] for name, metric in AGREEMENT.items()}


@torch.no_grad()
def log_prob_gaps(adapter: ModelAdapter, samples: dict[str, Tensor], options: argparse.Namespace) -> Iterator[Tensor]:
    """The trainer's log-prob less the rollout's, (B,) for each micro-batch and noisy step."""
    size = Size(options.size, options.size)
    schedule = adapter.schedule(options.steps, size)
    negative = PromptEmbeds.whole(samples["negative"]) if "negative" in samples else None
    for rows in torch.split(torch.arange(len(samples["groups"])), options.micro_batch):
        groups = samples["groups"][rows].tolist()
        prompts = concat_embeds([PromptEmbeds.whole(samples[f"embeds.{group}"]) for group in groups])
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


def parser() -> argparse.ArgumentParser:
    flags = report.parser("gap", __doc__)
    flags.add_argument("--model", type=Path, help="a folder of recipes.full_size.make_model (made)")
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
    flags.add_argument("--base", choices=("plain", "fp8"), default="plain", help="model.base")
    flags.add_argument("--lora-rank", type=int, default=0, help="adapt the family's linears with this rank (none)")
    return flags


if __name__ == "__main__":
    sys.exit(main())
