"""Make a preference data set of the tiny model's own pictures, for `recipes/tiny_dpo.toml`.

    python -m recipes.tiny.make_preferences --output runs/preferences

Paints training prompts several times without noise, has OCR score the pictures, and keeps the best and the worst of a
prompt where their scores differ: `preferences.jsonl` and its pictures. About two minutes on two CPU cores. Needs the
project's extra `local`.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from flowfleet.algorithms.preferences import make_pairs
from flowfleet.process.service import usable_cpus
from recipes.tiny.evaluation import Judge
from recipes.tiny.make_prompts import read_prompts
from recipes.tiny.making import load
from recipes.tiny.painting import paint
from recipes.tiny.signs import Pixels
from services.reward.scorer import Score

MODEL = Path(__file__).parent / "model"
FILE = "preferences.jsonl"

logger = logging.getLogger(__name__)


def make(options: argparse.Namespace) -> int:
    """Writes the data set and returns its number of pairs."""
    prompts = read_prompts("train")[: options.prompts]
    pipeline = load(QwenImagePipeline, MODEL, options.device)
    each = options.pictures
    painted = [paint(pipeline, prompts, options.seed + number) for number in range(each)]
    pictures = np.stack(painted, axis=1).reshape(len(prompts) * each, *painted[0].shape[1:])
    repeated = [prompt for prompt in prompts for _ in range(each)]
    outcomes = Judge(usable_cpus()).outcomes(pictures, repeated)
    scores = [one.value if isinstance(one, Score) else 0.0 for one in outcomes]  # without one: 0, the worst
    preferences = preferences_of(pictures, repeated, scores, each, pairs_per_prompt=1)
    write_preferences(options.output, preferences)
    return len(preferences)


class Preference(NamedTuple):
    """Two pictures (S, S, 3) uint8 of one prompt."""

    prompt: str
    chosen: Pixels
    rejected: Pixels


def preferences_of(
    pictures: Pixels, prompts: Sequence[str], rewards: Sequence[float], each: int, pairs_per_prompt: int
) -> list[Preference]:
    """Pairs of pictures (N, S, S, 3) with N prompts and rewards, `each` of one prompt in a row; see `make_pairs`."""
    pairs = make_pairs(rewards, [row // each for row in range(len(pictures))], pairs_per_prompt)
    return [Preference(prompts[pair.winner], pictures[pair.winner], pictures[pair.loser]) for pair in pairs]


def write_preferences(folder: Path, preferences: Sequence[Preference]) -> None:
    """Writes `FILE` with its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, one in enumerate(preferences):
        line = {"prompt": one.prompt}
        for verdict, picture in (("chosen", one.chosen), ("rejected", one.rejected)):
            line[verdict] = f"{number:05d}-{verdict}.png"
            Image.fromarray(picture).save(folder / line[verdict])
        lines.append(json.dumps(line) + "\n")
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--prompts", type=int, default=384, help="training prompts to paint (384)")
    parser.add_argument("--pictures", type=int, default=6, help="of each prompt (6)")
    parser.add_argument("--seed", type=int, default=100, help="of the first picture's noise (100)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logger.info("%d pairs in %s", make(options), options.output)


if __name__ == "__main__":
    main()
