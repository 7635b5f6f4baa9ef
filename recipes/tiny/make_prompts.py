"""Write the prompt files: `python -m recipes.tiny.make_prompts`.

The words of validation.txt appear in no line of train.txt and in no picture that the base model learned from.
"""

import itertools
import random
from pathlib import Path

from recipes.tiny.signs import draw_prompts, word_in

PROMPTS = Path(__file__).parent / "prompts"
NUM_TRAIN = 2000
NUM_VALIDATION = 256
SEED = 20261121


def main() -> None:
    rng = random.Random(SEED)
    validation = list(itertools.islice(draw_prompts(rng), NUM_VALIDATION))
    train = itertools.islice(draw_prompts(rng, held_out=frozenset(map(word_in, validation))), NUM_TRAIN)
    PROMPTS.mkdir(exist_ok=True)
    (PROMPTS / "validation.txt").write_text("\n".join(validation) + "\n")
    (PROMPTS / "train.txt").write_text("\n".join(train) + "\n")


def read_prompts(name: str) -> list[str]:
    """The lines of prompts/`name`.txt."""
    return (PROMPTS / f"{name}.txt").read_text().splitlines()


if __name__ == "__main__":
    main()
