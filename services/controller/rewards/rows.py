"""What a row of metrics says of each reward by itself: its raw scores, before clip, weight and gates. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence


def reward_row(prefix: str, rewards: Iterable[str], scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`PREFIX/rewards/NAME/mean` and `std` (ddof 0) over the samples that a reward scored, NaN without any, and
    `missing`: the others. `scores`: reward → raw score, one a sample."""
    row = {}
    for name in sorted(rewards):
        values = [one[name] for one in scores if name in one]
        row[f"{prefix}/rewards/{name}/mean"] = statistics.fmean(values) if values else float("nan")
        row[f"{prefix}/rewards/{name}/std"] = statistics.pstdev(values) if values else float("nan")
        row[f"{prefix}/rewards/{name}/missing"] = float(len(scores) - len(values))
    return row
