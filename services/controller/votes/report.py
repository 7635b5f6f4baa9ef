"""How far voters agree with themselves, with one another and with the other rewards. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from flowfleet.api.votes import RewardAgreement, Vote, VoteGroup, Voter, VoteReport, counted
from services.controller.votes.pairing import lacking

LOW, ENOUGH = 0.6, 10
"""A voter with a consistency below `LOW` over `ENOUGH` repeats is named: by chance two equal answers of three come in a
third to half of all repeats."""

Scores = Mapping[tuple[int, int, int], Mapping[str, float | None]]
"""(step, group, index) → raw score by reward."""
Share = tuple[float, int]
"""Sum of agreements, and number of comparisons."""


def report(groups: Sequence[VoteGroup], scores: Scores, guarded: bool) -> VoteReport:
    """Sums up votes. `scores`: of rewards other than the votes; `guarded`: something else restrains the policy."""
    voters = _voters(groups)
    both = [_same(*two) for group in groups for two in _shared(group)]
    return VoteReport(
        votes=sum(len(group.votes) for group in groups),
        groups=len(groups),
        waiting=sum(map(lacking, groups)),
        voters=voters,
        agreement=sum(both) / len(both) if both else None,
        rewards=dict(sorted(_rewards(groups, scores).items())),
        warnings=list(_warnings(voters, guarded)),
    )


def _warnings(voters: Sequence[Voter], guarded: bool) -> Iterator[str]:
    if not guarded:
        yield (
            "People's votes are the only guard of this job: no other reward has weight or a gate, and "
            "algorithm.kl_coef is 0. Add a reward with a gate, such as image_quality, or a KL penalty"
        )
    for voter in voters:
        if voter.consistency is not None and voter.repeats >= ENOUGH and voter.consistency < LOW:
            yield (
                f"{voter.name} chose the same in {voter.consistency:.0%} of {voter.repeats} pairs that came again: "
                "ask what they look at, or leave their votes out"
            )


def _voters(groups: Sequence[VoteGroup]) -> list[Voter]:
    repeats, shared = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
    number = defaultdict[str, int](int)
    for group in groups:
        first: dict[tuple[str, tuple[int, int]], Vote] = {}
        for vote in group.votes:
            number[vote.voter] += 1
            before = first.setdefault((vote.voter, vote.pair), vote)
            if before is not vote:
                repeats[vote.voter].append(_same(before, vote))
        for one, other in _shared(group):
            for vote in (one, other):
                shared[vote.voter].append(_same(one, other))
    return [
        Voter(
            name=name,
            votes=number[name],
            repeats=len(repeats[name]),
            consistency=_share(repeats[name]),
            shared=len(shared[name]),
            agreement=_share(shared[name]),
        )
        for name in sorted(number, key=lambda name: (-number[name], name))
    ]


def _shared(group: VoteGroup) -> Iterator[tuple[Vote, Vote]]:
    """Votes of two voters on one pair."""
    by_pair = defaultdict[tuple[int, int], list[Vote]](list)
    for vote in counted(group.votes):
        by_pair[vote.pair].append(vote)
    for votes in by_pair.values():
        yield from itertools.combinations(votes, 2)


def _same(one: Vote, other: Vote) -> bool:
    """True if two votes on one pair say the same, whichever sides the samples were on."""
    return one.better == other.better and (one.better is not None or one.choice == other.choice)


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _rewards(groups: Sequence[VoteGroup], scores: Scores) -> dict[str, RewardAgreement]:
    found = defaultdict[str, list[float]](list)
    for group in groups:
        for vote in counted(group.votes):
            if vote.better is None:
                continue
            worse = vote.left + vote.right - vote.better
            good, bad = (scores.get((group.step, group.group, index), {}) for index in (vote.better, worse))
            for name in good.keys() & bad.keys():
                if (high := good[name]) is not None and (low := bad[name]) is not None:
                    found[name].append(0.5 if high == low else float(high > low))
    return {name: RewardAgreement(pairs=len(row), agreement=sum(row) / len(row)) for name, row in found.items()}
