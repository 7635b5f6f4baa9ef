"""Metrics of each reward by itself: its raw scores, before clip, weight and gates. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from flowfleet.job.data import DataPart
from flowfleet.job.spec import RewardPart


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


def source_rows(
    prefix: str,
    data: DataPart,
    rewards: Mapping[str, RewardPart],
    scores: Sequence[Mapping[str, float]],
    totals: Sequence[float | None],
    origins: Sequence[str],
) -> dict[str, float]:
    """`reward_row` of all samples, where a reward misses none of a source that it does not score, and of each named
    source as `PREFIX/sources/SOURCE/rewards/…`, with `reward_mean` of its totals and `num_samples`. `scores`, `totals`
    and `origins` (names of sources): one a sample."""
    row, asked = dict[str, float](), {source.name: data.scoring(source.name, rewards) for source in data.each}
    for name in rewards:
        of_reward = [one for one, origin in zip(scores, origins, strict=True) if name in asked[origin]]
        row |= reward_row(prefix, [name], of_reward)
    for source in filter(None, asked):
        chosen = [place for place, origin in enumerate(origins) if origin == source]
        known = [total for place in chosen if (total := totals[place]) is not None]
        own = f"{prefix}/sources/{source}"
        row |= reward_row(own, asked[source], [scores[place] for place in chosen])
        row[f"{own}/reward_mean"] = statistics.fmean(known) if known else float("nan")
        row[f"{own}/num_samples"] = float(len(chosen))
    return row
