"""Write the prompt files: `python -m recipes.tiny_video.make_prompts`.

No line of train.txt, and no film that the base model learned from, shares color, shape and direction with a line of
validation.txt.
"""

import random
from pathlib import Path

from recipes.tiny_video.clips import HELD_OUT_CLIPS, TRAIN_CLIPS

PROMPTS = Path(__file__).parent / "prompts"
SEED = 20261121


def main() -> None:
    rng = random.Random(SEED)
    PROMPTS.mkdir(exist_ok=True)
    for name, clips in {"train": TRAIN_CLIPS, "validation": HELD_OUT_CLIPS}.items():
        prompts = [clip.prompt for clip in clips]
        rng.shuffle(prompts)
        (PROMPTS / f"{name}.txt").write_text("\n".join(prompts) + "\n")


def read_prompts(name: str) -> list[str]:
    """The lines of prompts/`name`.txt."""
    return (PROMPTS / f"{name}.txt").read_text().splitlines()


if __name__ == "__main__":
    main()
