"""Preferences for `dpo` from votes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flowfleet.api.votes import VoteGroup, counted
from services.controller.votes.pairing import Pair


def preferred(group: VoteGroup) -> Iterator[tuple[int, int, int]]:
    """Better sample, worse sample, and by how many votes, for each pair that most votes decide. Ties, and votes that
    neither is good, decide nothing."""
    lead = defaultdict[Pair, int](int)
    for vote in counted(group.votes):
        if vote.better is not None:
            lead[vote.pair] += 1 if vote.better == vote.pair[0] else -1
    for (first, second), margin in sorted(lead.items()):
        if margin:
            yield (first, second, margin) if margin > 0 else (second, first, -margin)
