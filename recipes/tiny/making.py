"""Parts that the makers of the tiny checkpoints share: options, loading, the command, and pictures from fixed noise."""

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from flowfleet.models.loading import ALL_COMPONENTS, load_pipeline

NOISE_SEEDS = (7, 11, 12, 13)
NUM_STEPS = 6
BATCH_SIZE = 128

T = TypeVar("T", bound=Any)


def parser(about: str | None, **budgets: float) -> argparse.ArgumentParser:
    """A parser with the options of every maker, and those of its budgets."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--wrong-share", type=float, default=0.30, help="share of captions that name something else")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--sheet", type=Path, help="write samples of the finished model to this PNG")
    for name, amount in budgets.items():
        flags.add_argument(f"--{name.replace('_', '-')}", type=type(amount), default=amount, help=f"({amount:g})")
    return flags


def load(pipeline_class: Any, folder: Path, device: str) -> Any:
    """Loads a checkpoint as a user would, in fp32."""
    pipeline = load_pipeline(pipeline_class, folder, dtype=torch.float32, device=device, components=ALL_COMPONENTS)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], Any],
    evaluate: Callable[[Any, argparse.Namespace], Mapping[str, Any]],
) -> None:
    """Makes the pipeline, writes it with fp16 weights, loads it back and prints what `evaluate` finds, by noise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    pipeline = make(options)
    pipeline.to(torch.float16).save_pretrained(options.output, safe_serialization=True)
    for noise, found in evaluate(load(type(pipeline), options.output, options.device), options).items():
        print(json.dumps({"noise": noise} | dataclasses.asdict(found)))


def sample(pipeline: Any, prompts: Sequence[str], shape: tuple[int, ...], seed: int, **settings: Any) -> NDArray[Any]:
    """Samples as uint8, in deterministic steps from noise that is the same everywhere: a longer set begins with a
    shorter one. `shape` is that of one sample's latents."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.stack([torch.randn(shape, generator=generator) for _ in prompts]).to(pipeline.device)
    parts = [
        pipeline(
            prompt=list(prompts[start : start + BATCH_SIZE]),
            latents=noise[start : start + BATCH_SIZE],
            num_inference_steps=NUM_STEPS,
            output_type="np",
            **settings,
        )[0]
        for start in range(0, len(prompts), BATCH_SIZE)
    ]
    return (np.concatenate(parts) * 255).round().astype(np.uint8)


def mean_over(results: Sequence[T]) -> T:
    """Each figure's mean over `results`, dataclasses of equally many samples each."""
    rows = [dataclasses.astuple(result) for result in results]
    found: T = type(results[0])(*np.mean(rows, axis=0).tolist())
    return found
