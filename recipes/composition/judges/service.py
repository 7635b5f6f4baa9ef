"""The judges as rewards: functions of the scorer `python`, next to which a settings file lies for each.

    python -m services.reward --scorer python --settings recipes/composition/judges/reward.toml --port 9001
    python -m services.reward --scorer python --settings recipes/composition/judges/heldout.toml --port 9002
    flowfleet up --reward composition=127.0.0.1:9001 --reward composition_judge=127.0.0.1:9002

`reward_gradient.toml` serves the reward's smooth score, which ReFL and SRPO train on.

A service reads its judge when it starts, from `weights`, or the folder that $FLOWFLEET_COMPOSITION_JUDGES names:
`reward-64.safetensors` looks at pictures of 64 pixels. Larger pictures than a judge's are averaged down to its size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from flowfleet.hardware import devices
from recipes.composition.judges.findings import SIGN, Findings, answer
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.loading import load_judge
from recipes.composition.judges.reward import RewardJudge
from services.reward.scorers.networks.geneval_rules import read_request

FOLDER: Final = "FLOWFLEET_COMPOSITION_JUDGES"
"""Environment variable that names the folder of the judges."""
WEIGHTS: Final = Path(__file__).parent / "weights"
SIZES: Final = (64, 128)


class Service:
    """A judge by its name, "reward" or "heldout", as a function of the scorer `python`. It gives all `COMPONENTS` that
    are asked for, and as the score the one that the parameter names."""

    def __init__(self, name: str, score: str) -> None:
        self._name, self._score = name, score

    def start(self) -> None:
        """Reads the judge for pictures of each size. ValueError where there is none."""
        there = [size for size in SIZES if file_of(self._name, size).is_file()]
        for size in there or SIZES[:1]:
            judge_of(self._name, size)

    def __call__(
        self,
        pictures: Sequence[Image.Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, str]],
        score: str | None = None,
    ) -> list[dict[str, float]]:
        """Scores in the order given; pictures of one size are looked at together."""
        scores: dict[int, dict[str, float]] = {}
        for size in {picture.size for picture in pictures}:
            places = [place for place, picture in enumerate(pictures) if picture.size == size]
            pixels = np.stack([np.asarray(pictures[place].convert("RGB")) for place in places])
            asked = [metadata[place] for place in places]
            found = look(self._name, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, asked)
            scores |= {
                place: answer(one, metadata[place], score or self._score)
                for place, one in zip(places, found, strict=True)
            }
        return [scores[place] for place in range(len(pictures))]


reward: Final = Service("reward", "partial")
"""What training is paid."""
heldout: Final = Service("heldout", "correct")
"""What training never sees."""


class Smooth:
    """The reward's smooth score, for losses that follow its gradient."""

    start = staticmethod(reward.start)

    def __call__(
        self, pictures: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, str]]
    ) -> torch.Tensor:
        judge, pictures = _fitting("reward", pictures)
        assert isinstance(judge, RewardJudge), "a file of the reward's holds the reward"
        return judge.smooth(pictures, metadata)


smooth: Final = Smooth()
"""What ReFL and SRPO are paid."""


def look(name: str, pictures: torch.Tensor, metadata: Sequence[Mapping[str, str]] = ()) -> list[Findings]:
    """Findings of a judge by name in squares (N, 3, S, S) float32 from 0 to 1, of any size that is a multiple of 64.

    metadata: of the prompts, if they are to be answered. ValueError for other pictures, where the judge's file is
    missing, and where a prompt asks for what the judge does not know.
    """
    judge, pictures = _fitting(name, pictures)
    asked = {noun for one in metadata for noun in read_request(one).names}
    if unknown := sorted(asked - {*judge.kind.nouns, SIGN}):
        raise ValueError(
            f"the judge {name!r} for pictures of {judge.kind.size} pixels knows no {', '.join(unknown[:3])}: name the "
            f"folder with the judges of this world by ${FOLDER}"
        )
    return judge.look(pictures)


def _fitting(name: str, pictures: torch.Tensor) -> tuple[RewardJudge | HeldoutJudge, torch.Tensor]:
    """The judge of the largest size that is there and divides the pictures', and the pictures averaged down to it."""
    height, width = pictures.shape[2:]
    if height != width or height % SIZES[0]:
        raise ValueError(f"pictures of {width}×{height} pixels: the judges look at squares of a multiple of {SIZES[0]}")
    fitting = [size for size in SIZES if height % size == 0]
    size = max([size for size in fitting if file_of(name, size).is_file()] or fitting)
    if height > size:
        pictures = F.avg_pool2d(pictures, height // size)
    return judge_of(name, size), pictures


def file_of(name: str, size: int) -> Path:
    """The file of a judge for pictures of a size."""
    return Path(os.environ.get(FOLDER, WEIGHTS)) / f"{name}-{size}.safetensors"


@cache
def judge_of(name: str, size: int) -> RewardJudge | HeldoutJudge:
    """The judge "reward" or "heldout" for pictures of a size, on the first accelerator, else the CPU. ValueError where
    its file is missing."""
    path = file_of(name, size)
    if not path.is_file():
        world, other = ("small", "") if size == SIZES[0] else ("full", " (of the medium world by `--world medium`)")
        raise ValueError(
            f"{path} is missing: make it by `python -m recipes.composition.judges.train_{name} --world {world} "
            f"--output {path}`{other}, or name the folder of the judges by ${FOLDER}"
        )
    return load_judge(path, devices.pick_device())
