"""Which samples a page of the best or the worst shows: the newest step first, and one for each prompt. Pure.

The lowest rewards of a whole job are those of its first step, and the highest often belong to one easy prompt. So the
newest step comes first with the best or worst sample of each prompt. Earlier steps add the prompts that it lacks. If
samples are still missing, each prompt gets another one, from the newest step on again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from flowfleet.api.samples import Sample


def picks(samples: Iterable[Sample], num: int, *, best: bool) -> list[Sample]:
    """Picks at most `num` of the samples that have a reward, in the order to show them."""
    steps: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            steps[sample.step].append(sample)
    rounds: dict[int, list[Sample]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for step in sorted(steps, reverse=True):
        for sample in sorted(steps[step], key=lambda item: item.reward or 0.0, reverse=best):
            rounds[seen[sample.prompt]].append(sample)
            seen[sample.prompt] += 1
    return [sample for turn in sorted(rounds) for sample in rounds[turn]][:num]
