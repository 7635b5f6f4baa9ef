"""Scores of a group: from pairs by Bradley and Terry's model or by the share won, from rankings by Borda's count.

Everything that is drawn is drawn by the contents of the group, so that equal groups get equal questions.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR_WINS = 0.5
"""Each sample has won and lost so often against one of strength 0: it keeps strengths finite where one wins all."""

Pair = tuple[int, int]


def seeded(digests: Sequence[bytes], prompt: str) -> random.Random:
    """A generator for a group: equal for equal contents in equal order."""
    return random.Random(hashlib.sha256(b"".join([prompt.encode("utf-8", "replace"), *digests])).digest())


def choose_pairs(count: int, most: int, draw: random.Random) -> list[Pair]:
    """Chooses all pairs of `count` samples if these are at most `most`, else max(`most`, `count`) of them, in rings. A
    ring has each sample equally often; the first connects all samples, the last may be a random part."""
    pairs = list(itertools.combinations(range(count), 2))
    if len(pairs) <= most:
        return pairs
    order = list(range(count))
    draw.shuffle(order)
    chosen: list[Pair] = []
    for distance in range(1, count // 2 + 1):
        ring = sorted({_pair(order[place], order[(place + distance) % count]) for place in range(count)})
        room = max(most, count) - len(chosen)
        chosen += ring if len(ring) <= room else draw.sample(ring, room)
    return chosen


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def win_rates(count: int, pairs: Sequence[Pair], wins: Sequence[float]) -> NDArray[np.float64]:
    """(count,) share of its comparisons that each sample won; NaN for one without any.

    wins: of each pair how far its first sample won, 0 to 1.
    """
    table = _table(count, pairs, wins)
    games = (table + table.T).sum(1)
    rates: NDArray[np.float64] = np.divide(table.sum(1), games, out=np.full(count, np.nan), where=games > 0)
    return rates


def bradley_terry(count: int, pairs: Sequence[Pair], wins: Sequence[float]) -> NDArray[np.float64]:
    """(count,) log-strengths s of mean 0 with P(i beats j) = 1 / (1 + exp(s_j − s_i)), by maximum a posteriori.

    wins as in `win_rates`; fractions count as such. NaN for a sample without comparisons. Newton's method on the
    concave log-posterior, damped.
    """
    table = _table(count, pairs, wins)
    games = table + table.T
    strengths = np.zeros(count)
    for _ in range(100):
        expected = 1.0 / (1.0 + np.exp(strengths[None, :] - strengths[:, None]))
        alone = 1.0 / (1.0 + np.exp(-strengths))
        gradient = table.sum(1) - (games * expected).sum(1) + PRIOR_WINS * (1.0 - 2.0 * alone)
        curvature = games * expected * (1.0 - expected)
        hessian = np.diag(curvature.sum(1) + 2.0 * PRIOR_WINS * alone * (1.0 - alone)) - curvature
        step = np.linalg.solve(hessian, gradient)
        strengths += step / max(1.0, float(np.abs(step).max()))
        if float(np.abs(step).max()) < 1e-10:
            break
    compared = games.sum(1) > 0
    return np.where(compared, strengths - strengths[compared].mean() if compared.any() else 0.0, np.nan)


def _table(count: int, pairs: Sequence[Pair], wins: Sequence[float]) -> NDArray[np.float64]:
    """(count, count): how much row won over column."""
    table = np.zeros((count, count))
    for (first, second), won in zip(pairs, wins, strict=True):
        table[first, second] += won
        table[second, first] += 1.0 - won
    return table


def choose_lists(count: int, size: int, draw: random.Random) -> list[list[int]]:
    """Splits all samples, in random order, into the fewest lists of at most `size`, as even as they can be."""
    order = list(range(count))
    draw.shuffle(order)
    return [part.tolist() for part in np.array_split(np.array(order), -(-count // size))]


def parse_ranking(text: str, count: int) -> list[int]:
    """Places 0 … count − 1, best first, of an answer such as "2, 1, 3" or "2 > 1 > 3". ValueError for what is no
    permutation of 1 … count."""
    places = [int(number) - 1 for number in re.findall(r"\d+", text)]
    if sorted(places) != list(range(count)):
        raise ValueError(
            f"the answer {text[:120]!r} does not rank {count} pictures: each number from 1 to {count}, once"
        )
    return places


def borda(count: int, rankings: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """(count,) mean place of each sample, 1 for first and 0 for last; NaN for one that is in no ranking of two or more.

    rankings: samples of each, best first.
    """
    places: list[list[float]] = [[] for _ in range(count)]
    for ranking in rankings:
        for place, sample in enumerate(ranking):
            if len(ranking) > 1:
                places[sample].append(1.0 - place / (len(ranking) - 1))
    return np.array([np.mean(found) if found else np.nan for found in places])
