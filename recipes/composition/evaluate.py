"""How well a model composes: pictures of held-out prompts from fixed noise, scored by a judge, by category.

    python -m recipes.composition.evaluate --world full --model runs/composition_full --judge HELDOUT.safetensors \\
        --guidance 1 1.5 2 3

Prints a JSON line per guidance scale and writes the first pictures to `--sheet`, and all with their prompts to
`--pictures`, where people label them by `recipes.composition.judges.labels`. Two controls of what reinforcement
learning gains: the best of the scales, and `--best-of 16 --chooser REWARD.safetensors`, the score of the picture that
the reward likes most. `--adapter` adds what a LoRA job left in its folder `model`.

Guards in each line: edge density and color entropy; by the held-out judge's features, the distance of the pictures to
renders, and with `--best-of` how unlike a prompt's pictures are; with `--chooser`, the share of the prompts on whose
first picture the two judges part.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.composition.captions import prompt_lines
from recipes.composition.judges import guards, labels
from recipes.composition.judges.agreement import Judge
from recipes.composition.judges.findings import answer
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.loading import load_judge
from recipes.composition.make_prompts import read_lines
from recipes.composition.pretrain import NUM_SAMPLING_STEPS, NUM_SHOWN, SHOWN_COLUMNS, load
from recipes.composition.render import render
from recipes.composition.scenes import CATEGORIES, choose, draw
from recipes.composition.world import WORLDS, Split, World
from recipes.tiny.painting import contact_sheet, paint
from recipes.tiny.signs import Pixels

PROMPTS_SEED = 20_000
LOOK_BATCH = 128
NUM_RENDERS = 2048
"""Renders that pictures are compared with."""

Line = Mapping[str, Any]
"""A prompt with its metadata, as `captions.prompt_lines` writes it."""


def by_category(judge: Judge, pictures: Pixels, lines: Sequence[Line], score: str) -> dict[str, float]:
    """Mean `score` of the judge in each category that occurs, then "mean" over the categories."""
    found: dict[str, list[float]] = defaultdict(list)
    for line, value in zip(lines, scores(judge, pictures, lines, score), strict=True):
        found[line["metadata"]["tag"]].append(value)
    means = {name: float(np.mean(found[name])) for name in CATEGORIES if name in found}
    return means | {"mean": float(np.mean(list(means.values())))}


def scores(judge: Judge, pictures: Pixels, lines: Sequence[Line], score: str) -> list[float]:
    """A score for each of the pictures (N, S, S, 3) uint8."""
    findings = []
    for part in torch.split(torch.from_numpy(pictures).permute(0, 3, 1, 2), LOOK_BATCH):
        findings += judge.look(part.float() / 255)
    return [answer(seen, line["metadata"], score)["score"] for seen, line in zip(findings, lines, strict=True)]


def best_of(pictures: Sequence[Pixels], chooser: Judge, lines: Sequence[Line]) -> Pixels:
    """Chooses for each prompt the one of its pictures that `chooser` gives the most; the first of equals."""
    liked = np.array([scores(chooser, ones, lines, "partial") for ones in pictures])
    chosen: Pixels = np.stack(pictures)[liked.argmax(0), np.arange(len(lines))]
    return chosen


def looks(pictures: Pixels) -> dict[str, float]:
    """Statistics that a hacked reward moves."""
    return {
        "edge_density": float(np.mean([edge_density(picture) for picture in pictures])),
        "colour_entropy": float(np.mean([colour_entropy(picture) for picture in pictures])),
    }


def unlike(judge: HeldoutJudge, pictures: Pixels, tries: Sequence[Pixels], renders: torch.Tensor) -> dict[str, float]:
    """Distance of the pictures to renders, whose features are given, and of a prompt's `tries` to one another."""
    found = {"distance_to_renders": guards.frechet(guards.features(judge.features, pictures), renders)}
    if len(tries) > 1:
        found["diversity"] = guards.diversity([guards.features(judge.features, ones) for ones in tries])
    return found


def features_of_renders(judge: HeldoutJudge, world: World) -> torch.Tensor:
    """(NUM_RENDERS, channels): features of renders of all kinds of scenes."""
    scenes = draw(world, NUM_RENDERS, torch.Generator().manual_seed(PROMPTS_SEED), split="any")
    pixels = (render(world, scenes, "cpu").permute(0, 2, 3, 1) * 255).round().byte().numpy()
    return guards.features(judge.features, pixels)


def held_out(world: World, split: Split, num: int) -> list[dict[str, Any]]:
    """The first `num` prompts of a split, the same everywhere."""
    return prompt_lines(world, choose(world, num, torch.Generator().manual_seed(PROMPTS_SEED), split=split))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter that a job left")
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--judge", type=Path, required=True, help="file of the judge that scores")
    parser.add_argument("--chooser", type=Path, help="file of a second judge: it chooses among --best-of pictures")
    parser.add_argument("--best-of", type=int, default=1, help="pictures for each prompt, of which one is scored")
    parser.add_argument("--score", choices=("correct", "strict", "partial"), default="correct")
    parser.add_argument("--prompts", type=Path, help="JSON Lines file; without it prompts are drawn")
    parser.add_argument("--split", choices=("train", "seen", "unseen"), default="seen", help="of drawn prompts")
    parser.add_argument("--num", type=int, default=1024, help="prompts at most")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--sampling-steps", type=int, default=NUM_SAMPLING_STEPS)
    parser.add_argument("--seed", type=int, default=7, help="seed of the noise")
    parser.add_argument("--sheet", type=Path, help="write the first pictures at the first scale to this PNG")
    parser.add_argument("--pictures", type=Path, help="write the pictures at the first scale here, for judges.labels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.best_of > 1 and options.chooser is None:
        parser.error("--best-of needs a chooser: give --chooser")
    return options


def main() -> None:
    options = parse_options()
    world = World.named(options.world)
    lines = read_lines(options.prompts) if options.prompts else held_out(world, options.split, options.num)
    lines = lines[: options.num]
    prompts = [line["prompt"] for line in lines]
    pipeline = load(options.model, torch.device(options.device))
    if options.adapter is not None:
        pipeline.load_lora_weights(str(options.adapter))
    judge = load_judge(options.judge, options.device)
    renders = features_of_renders(judge, world) if isinstance(judge, HeldoutJudge) else None
    chooser = load_judge(options.chooser, options.device) if options.chooser else None
    for place, scale in enumerate(options.guidance):
        tries = [
            paint(
                pipeline,
                prompts,
                options.seed + number,
                image_size=world.size,
                num_steps=options.sampling_steps,
                guidance_scale=scale,
            )
            for number in range(options.best_of)
        ]
        pictures = tries[0] if chooser is None else best_of(tries, chooser, lines)
        about = {"guidance": scale, "prompts": len(lines), "best_of": options.best_of}
        figures = by_category(judge, pictures, lines, options.score) | looks(pictures)
        if isinstance(judge, HeldoutJudge) and renders is not None:
            figures |= unlike(judge, pictures, tries, renders)
        if chooser is not None:
            both = (scores(one, tries[0], lines, "correct") for one in (judge, chooser))
            figures["judges_part"] = guards.parted(*both)
        print(json.dumps(about | {name: round(value, 4) for name, value in figures.items()}), flush=True)
        if options.pictures is not None and place == 0:
            labels.save(options.pictures, torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255, lines)
        if options.sheet is not None and place == 0:
            options.sheet.parent.mkdir(parents=True, exist_ok=True)
            contact_sheet(pictures[:NUM_SHOWN], scale=1, num_columns=SHOWN_COLUMNS).save(options.sheet)


if __name__ == "__main__":
    main()
