"""Either judge by its file."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.composition.judges.files import read
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.reward import RewardJudge


def load_judge(path: Path, device: torch.device | str = "cpu") -> RewardJudge | HeldoutJudge:
    """The judge that a file holds. Raises ValueError for a file that is not a judge's."""
    kind, parts = read(path)
    judge = (HeldoutJudge if kind.name == "heldout" else RewardJudge)(kind, device)
    judge.restore(parts)
    return judge
