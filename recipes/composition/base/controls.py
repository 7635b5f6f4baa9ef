"""Controls of what reinforcement learning gains: plain fine-tuning of the same base, with its GPU-seconds counted.

    python -m recipes.composition.base.controls renders --world small --model BASE --output FOLDER
    python -m recipes.composition.base.controls samples --world small --model BASE --weight best \\
        --reward REWARD.safetensors --output FOLDER

`renders` trains on new scenes of the training split with right captions. `samples` trains on the base's own pictures
of the training prompts, weighted within each prompt:

    none    all alike
    best    the picture that the reward gives the most, and no other (RAFT, https://arxiv.org/abs/2304.06767)
    reward  exp(advantage / beta): reward-weighted regression, as AWR weights it (https://arxiv.org/abs/1910.00177)

Only the transformer changes. Another round begins with the output of the last one as `--model`. Prints a JSON line;
its seconds are those that each part held the device, and "training" leaves out compilation, which is counted apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from flowfleet.algorithms.advantages import group_advantages
from recipes.composition.base.autoencoder import encode_pixels
from recipes.composition.base.flow import FlowRecipe, Pictures, pictures_of, train_transformer
from recipes.composition.base.training import prepared, seconds_at_speed
from recipes.composition.evaluate import scores
from recipes.composition.judges.agreement import Judge
from recipes.composition.judges.loading import load_judge
from recipes.composition.make_prompts import read_lines, read_prompts
from recipes.composition.pretrain import (
    NUM_SAMPLING_STEPS,
    grid_of,
    load,
    save,
    scenes_to_learn,
    stored_dtype,
)
from recipes.composition.world import WORLDS, World
from recipes.tiny.painting import paint

RENDERS_SEED, NOISE_SEED = 30_000, 40_000
"""Where seeds begin: pre-training and evaluation use none from here on."""
MOST_WARMUP = 500

Weight = Literal["none", "best", "reward"]


class Clock:
    """Seconds that the device was held, by part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Waits for the device; counts the seconds since the last lap for `part`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def weights_of(rewards: NDArray[np.float64], how: Weight, beta: float) -> NDArray[np.float64]:
    """Weight of each picture; rewards (prompts, pictures of each), weights alike.

    "reward" weighs by exp(advantage / beta), the advantage in standard deviations of the prompt's rewards, and scales
    to a mean of 1 over each prompt's pictures. "best" gives 1 to the first of a prompt's best, 0 to its others.
    """
    num_prompts, each = rewards.shape
    if how == "none":
        return np.ones_like(rewards)
    if how == "best":
        best: NDArray[np.float64] = np.eye(each)[rewards.argmax(1)]
        return best
    prompts = np.repeat(np.arange(num_prompts), each).tolist()
    advantages = group_advantages(rewards.ravel(), prompts, std="group", clamp=None)[0].reshape(rewards.shape)
    raised = np.exp((advantages - advantages.max(1, keepdims=True)) / beta)
    scaled: NDArray[np.float64] = raised / raised.mean(1, keepdims=True)
    return scaled


def own_pictures(
    pipeline: Any, judge: Judge | None, world: World, options: argparse.Namespace, clock: Clock
) -> tuple[Pictures, dict[str, Any]]:
    """The model's pictures of the prompts with their weights, those of weight 0 left out; and what to report."""
    lines = read_lines(options.prompts) if options.prompts else read_prompts(options.world, "train")
    prompts = [line["prompt"] for line in lines]
    first = NOISE_SEED + options.seed * options.per_prompt
    tries = [
        paint(
            pipeline,
            prompts,
            first + number,
            image_size=world.size,
            num_steps=options.sampling_steps,
            guidance_scale=options.guidance,
        )
        for number in range(options.per_prompt)
    ]
    clock.lap("sampling")
    rewards, about = np.zeros((len(lines), options.per_prompt)), dict[str, Any]()
    if judge is not None:
        rewards = np.array([scores(judge, pictures, lines, "partial") for pictures in tries]).T
        about["reward"] = round(float(rewards.mean()), 4)
        clock.lap("judging")
    weights = weights_of(rewards, options.weight, options.beta).T.ravel()
    kept = weights > 0
    pixels = torch.from_numpy(np.concatenate(tries)[kept]).permute(0, 3, 1, 2).to(options.device)
    texts = [text for text, is_kept in zip(prompts * options.per_prompt, kept, strict=True) if is_kept]
    latents = encode_pixels(pipeline.vae, pixels)
    pictures = pictures_of(pipeline, latents, texts, stored_dtype(latents.device))
    clock.lap("encoding")
    about |= {"weight": options.weight, "guidance": options.guidance, "made": len(weights), "kept": int(kept.sum())}
    return replace(pictures, weights=torch.from_numpy(weights[kept]).float().to(options.device)), about


def tune(pipeline: Any, judge: Judge | None, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Trains the pipeline's transformer as the options say. Returns what to report."""
    device = torch.device(options.device)
    clock = Clock(device)
    if options.data == "renders":
        pictures = scenes_to_learn(pipeline, world, options.pictures, 0.0, RENDERS_SEED + options.seed, device)
        about: dict[str, Any] = {"made": options.pictures}
        clock.lap("rendering")
    else:
        pictures, about = own_pictures(pipeline, judge, world, options, clock)
    torch.manual_seed(options.seed)
    warmup = min(MOST_WARMUP, options.steps // 10)
    recipe = FlowRecipe(options.steps, options.rate, warmup, batch_size=options.batch)
    reports = train_transformer(pipeline, pictures, grid_of(world), recipe, compiled=device.type == "cuda")
    clock.lap("training")
    whole, clock.seconds["training"] = clock.seconds["training"], seconds_at_speed(reports)
    clock.seconds["compiling"] = max(0.0, whole - clock.seconds["training"])
    losses = [round(report.loss, 4) for report in (reports[0], reports[-1])]
    seconds = {part: round(value, 2) for part, value in clock.seconds.items()}
    return {"data": options.data, **about, "steps": options.steps, "losses": losses, "seconds": seconds}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", type=Path, required=True, help="folder of the base")
    common.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    common.add_argument("--world", choices=WORLDS, required=True)
    common.add_argument("--steps", type=count, default=5000)
    common.add_argument("--batch", type=count, default=128, help="pictures of a step")
    common.add_argument("--rate", type=above_zero, default=3e-4, help="learning rate")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="data", required=True)
    renders = kinds.add_parser("renders", parents=[common], help="train on new scenes with right captions")
    renders.add_argument("--pictures", type=count, default=50_000, help="scenes to render")
    samples = kinds.add_parser("samples", parents=[common], help="train on the base's own pictures")
    samples.add_argument("--prompts", type=Path, help="JSON Lines file; without it the world's training prompts")
    samples.add_argument("--per-prompt", type=count, default=8, help="pictures of each prompt")
    samples.add_argument("--guidance", type=at_least_one, default=1.0, help="scale that pictures are made with")
    samples.add_argument("--sampling-steps", type=count, default=NUM_SAMPLING_STEPS)
    samples.add_argument("--weight", choices=get_args(Weight), default="none")
    samples.add_argument("--reward", type=Path, help="file of the reward's judge, whose partial score is the reward")
    samples.add_argument("--beta", type=above_zero, default=1.0, help="temperature of --weight reward")
    options = parser.parse_args(arguments)
    if options.output.resolve() == options.model.resolve():
        parser.error("--output would overwrite the base: name another folder")
    if options.data == "samples":
        if options.weight != "none" and options.reward is None:
            samples.error(f"--weight {options.weight} needs a reward: give --reward")
        if options.weight != "none" and options.per_prompt < 2:
            samples.error(f"--weight {options.weight} compares a prompt's pictures: give --per-prompt 2 or more")
    return options


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def at_least_one(text: str) -> float:
    """A guidance scale."""
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is below 1, which is no guidance: give 1 or more")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def reward_of(path: Path, device: str) -> Judge:
    """The judge in a file. ValueError for one that training must never see."""
    judge = load_judge(path, device)
    if judge.kind.name != "reward":
        raise ValueError(f"{path} is the held-out judge, which training must never see: give the reward's file")
    return judge


@prepared()
def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    world = World.named(options.world)
    pipeline = load(options.model, torch.device(options.device))
    path = options.reward if options.data == "samples" else None
    about = tune(pipeline, reward_of(path, options.device) if path else None, world, options)
    print(json.dumps(about | {"output": str(options.output), "sha256": save(pipeline, options.output)}))


if __name__ == "__main__":
    main()
