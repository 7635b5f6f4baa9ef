"""Make a preference data set of a base's own pictures, for DPO from pairs.

    python -m recipes.composition.base.preferences --world small --model BASE --output FOLDER --pairs 6912

Paints training prompts, twelve pictures of each, and has the reward's judge score them. Pairs are those of online DPO:
best and worst, second best and second worst, and so on, without pairs of equals. It paints until there are enough: a
job reads all of a data set's pictures, and more were made for it. Writes `preferences.jsonl` with its pictures, and
prints a JSON line with both numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from recipes.composition.atlas import blank
from recipes.composition.base.controls import NOISE_SEED, at_least_one, count, reward_of
from recipes.composition.base.training import prepared
from recipes.composition.evaluate import Line, scores
from recipes.composition.judges.agreement import Judge
from recipes.composition.judges.service import file_of
from recipes.composition.make_prompts import read_lines, read_prompts
from recipes.composition.pretrain import load
from recipes.composition.world import WORLDS, World
from recipes.tiny.painting import BATCH_SIZE, paint
from recipes.tiny.pairs import Preference, preferences_of, write_preferences

FIRST_NOISE: Final = NOISE_SEED + 10_000
"""Where seeds begin: the controls' are below."""

logger = logging.getLogger(__name__)


def find(
    pipeline: Any, judge: Judge, world: World, lines: Sequence[Line], options: argparse.Namespace
) -> tuple[list[Preference], int]:
    """Paints the prompts in their order, again and again, until `options.pairs` are found; also how many pictures that
    took. ValueError where the judge prefers none of the pictures of all prompts."""
    each, found, made = options.pictures, list[Preference](), 0
    size = max(1, BATCH_SIZE // each)
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    for number, part in enumerate(itertools.cycle(parts)):
        if number == len(parts) and not found:
            raise ValueError("the reward scores all pictures of a prompt alike, for each prompt: raise --pictures")
        repeated = [line for line in part for _ in range(each)]
        prompts = [line["prompt"] for line in repeated]
        pictures = paint(
            pipeline,
            prompts,
            FIRST_NOISE + options.seed * 10_000 + number,
            image_size=world.size,
            num_steps=options.sampling_steps,
            guidance_scale=options.guidance,
        )
        found += preferences_of(pictures, prompts, scores(judge, pictures, repeated, "partial"), each, each // 2)
        made += len(pictures)
        logger.info("%d pairs of %d pictures", len(found), made)
        if len(found) >= options.pairs:
            break
    return found[: options.pairs], made


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--reward", type=Path, help="file of the reward's judge; without it the world's own")
    parser.add_argument("--prompts", type=Path, help="JSON Lines file; without it the world's training prompts")
    parser.add_argument("--pairs", type=count, default=2160, help="72 for each step of a job of 144 pictures (2160)")
    parser.add_argument("--pictures", type=count, default=12, help="made of each prompt (12)")
    parser.add_argument("--guidance", type=at_least_one, default=1.0, help="scale that pictures are made with (1)")
    parser.add_argument("--sampling-steps", type=count, default=8, help="as the small world's jobs (8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.pictures < 2:
        parser.error("--pictures 1 leaves nothing to prefer: give 2 or more")
    return options


@prepared()
def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    world = World.named(options.world, blank())  # for its size: the base knows what things look like
    judge = reward_of(options.reward or file_of("reward", world.size), options.device)
    lines = read_lines(options.prompts) if options.prompts else read_prompts(options.world, "train")
    found, made = find(load(options.model, torch.device(options.device)), judge, world, lines, options)
    write_preferences(options.output, found, options.model)
    print(json.dumps({"pairs": len(found), "pictures_made": made, "output": str(options.output)}))


if __name__ == "__main__":
    main()
