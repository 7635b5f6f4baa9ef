"""Which pairs a voter is shown. Pure, but for the random generator that is handed in.

    the oldest group that lacks votes ─► a pair that joins what no vote compares yet, else of the least voted samples
    one pair in ten ─► one that was voted on before, by this voter (consistency) or by another (agreement)

A group is complete when it has the votes that it wants, and they connect all of its samples: scores of samples that no
chain of votes compares would be arbitrary. No voter gets a pair of a group twice, but to measure consistency.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowfleet.api.votes import Vote, VoteGroup, counted

CHECK_SHARE = 0.1
"""Share of pairs that are shown again to measure voters."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shown:
    """A pair as it is shown: the group, and the indices on the left and on the right."""

    group: VoteGroup
    left: int
    right: int


def is_complete(samples: Sequence[int], votes: Sequence[Vote], wanted: int) -> bool:
    """True if a group of these samples needs no more votes."""
    valid = [vote for vote in counted(votes) if {vote.left, vote.right} <= set(samples)]
    return len(valid) >= wanted and len(_parts(samples, [vote.pair for vote in valid])) == 1


def lacking(group: VoteGroup) -> int:
    """Votes that a group waits for."""
    return 0 if group.complete else max(1, group.wanted - len(counted(group.votes)))


def next_pairs(
    waiting: Sequence[VoteGroup], ended: Sequence[VoteGroup], voter: str, count: int, draw: random.Random
) -> list[Shown]:
    """Up to `count` pairs for a voter, in order. `waiting`: groups that lack votes, oldest first; `ended`: some that
    lack none and whose samples can still be shown."""
    found = list[Shown]()
    fresh = _fresh(waiting, voter, draw)
    known = _known([*waiting, *ended], voter, draw)
    while len(found) < count:
        order = (known, fresh) if draw.random() < CHECK_SHARE else (fresh, known)
        shown = next(order[0], None) or (next(fresh, None) if order[0] is known else None)
        if shown is None:
            break
        found.append(shown)
    return found


def _fresh(waiting: Sequence[VoteGroup], voter: str, draw: random.Random) -> Iterator[Shown]:
    """Pairs that groups lack votes on, group after group."""
    for group in waiting:
        votes = counted(group.votes)
        taken = Counter(vote.pair for vote in votes)
        mine = {vote.pair for vote in votes if vote.voter == voter}
        for _ in range(lacking(group)):
            if (pair := _pair([one.index for one in group.samples], taken, mine, draw)) is None:
                break
            taken[pair] += 1
            mine.add(pair)
            yield _sides(group, pair, draw)


def _pair(samples: Sequence[int], taken: Counter[Pair], mine: set[Pair], draw: random.Random) -> Pair | None:
    """The pair that tells most: first one that joins two parts which no vote connects, then of samples and pairs with
    the fewest votes. None where the voter has seen all of them."""
    part_of = {index: number for number, part in enumerate(_parts(samples, list(taken))) for index in part}
    degree = Counter[int]()
    for pair, number in taken.items():
        degree.update(dict.fromkeys(pair, number))
    for one in sorted(samples, key=lambda index: (degree[index], draw.random())):
        others = [other for other in samples if other != one and _ordered(one, other) not in mine]
        if others:
            best = min(
                others,
                key=lambda o: (part_of[o] == part_of[one], taken[_ordered(one, o)], degree[o], draw.random()),
            )
            return _ordered(one, best)
    return None


def _known(groups: Sequence[VoteGroup], voter: str, draw: random.Random) -> Iterator[Shown]:
    """Pairs with a vote, in any order, half of them the voter's own if there are any; each once, and no pair that the
    voter has repeated already."""
    own, others = list[Shown](), list[Shown]()
    for group in groups:
        times = Counter(vote.pair for vote in group.votes if vote.voter == voter)
        for vote in {vote.pair: vote for vote in group.votes}.values():
            if times[vote.pair] == 1:  # the other way round, so that a favorite side shows
                own.append(Shown(group, vote.right, vote.left))
            elif not times[vote.pair]:
                others.append(_sides(group, vote.pair, draw))
    for shown in (own, others):
        draw.shuffle(shown)
    while own or others:
        yield (own if own and (not others or draw.random() < 0.5) else others).pop()


def _sides(group: VoteGroup, pair: Pair, draw: random.Random) -> Shown:
    left, right = pair if draw.random() < 0.5 else pair[::-1]
    return Shown(group, left, right)


def _ordered(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def _parts(samples: Sequence[int], pairs: Sequence[Pair]) -> list[set[int]]:
    """Sets of samples that pairs connect."""
    parts = [{index} for index in samples]
    for pair in pairs:
        joined = [part for part in parts if part & set(pair)]
        parts = [part for part in parts if not part & set(pair)] + [set().union(*joined)]
    return parts


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
