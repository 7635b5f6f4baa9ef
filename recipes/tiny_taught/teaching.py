"""Supervised teaching of a random tiny checkpoint, whatever its family: what an adapter samples with is what it learns.

    python -m tests.tiny_models flux_kontext runs/random-edit       # a random checkpoint; ltx2 for films with sound

A share of the lessons is answered wrongly, which is the flaw that reinforcement learning is to repair.
"""

import argparse
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.settings import Size
from recipes.tiny.training import Loss, train_average

Lesson = tuple[Tensor, PromptEmbeds]
"""Clean latents (B, *latent_shape), and their prompts."""
BATCH_SIZE = 64
RATE = 3e-3


def teach(adapter: ModelAdapter, draw: Callable[[], Lesson], size: Size, seconds: float) -> None:
    """Flow matching on what `draw` gives: the velocity noise − latents at logit-normal times; see `train_average`."""
    average = adapter.pipeline.transformer

    def loss_of(student: Any) -> Loss:
        adapter.pipeline.transformer = student

        def loss() -> Tensor:
            clean, prompts = draw()
            noise, sigmas = torch.randn_like(clean), torch.sigmoid(1.2 * torch.randn(len(clean)) + 0.3)
            noisy = torch.lerp(clean, noise, sigmas.view(-1, *(1,) * (clean.ndim - 1)))
            velocity = adapter.velocity(noisy, 1000 * sigmas, prompts, size=size)
            return (velocity - (noise - clean)).square().mean()

        return loss

    train_average(average, loss_of, seconds, RATE, lambda: None, recorded=False)
    adapter.pipeline.transformer = average


def options(about: str | None, wrong_share: float, **budgets: float) -> argparse.Namespace:
    """The command's options: where from and to, the share of wrong answers, seconds of each part."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--base", type=Path, required=True, help="folder of a random tiny checkpoint")
    flags.add_argument("--output", type=Path, required=True, help="folder of the taught one, and of its prompt files")
    flags.add_argument("--wrong-share", type=float, default=wrong_share, help="share of wrong lessons")
    flags.add_argument("--seed", type=int, default=0)
    for name, seconds in budgets.items():
        flags.add_argument(f"--{name}-seconds", type=float, default=seconds, help=f"({seconds:g})")
    chosen = flags.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # two wait for each other more than they compute in models of this size
    return chosen


def write_prompts(folder: Path, name: str, lines: Sequence[dict[str, Any]], column: str) -> None:
    """Writes NAME.jsonl, and as a control NAME-shuffled.jsonl, in which `column`, that the reward reads, is another
    line's."""
    others = [line[column] for line in lines]
    random.Random(name).shuffle(others)
    shuffled = [line | {column: other} for line, other in zip(lines, others, strict=True)]
    for path, table in ((f"{name}.jsonl", lines), (f"{name}-shuffled.jsonl", shuffled)):
        (folder / path).write_text("".join(f"{json.dumps(line)}\n" for line in table), encoding="utf-8")
