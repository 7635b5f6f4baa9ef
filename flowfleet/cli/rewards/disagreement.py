"""Disagreement of a job's scorers: finds the samples that they judge most differently, to judge the scorers by. Pure.

Scores of different scorers have different units, and training compares samples within their group alone. So each scorer
is represented by a sample's place in the group: (rank − 1) / (n − 1) of the n members that it scored, from 0 for the
lowest to 1 for the highest; ties share their mean rank. Two scorers disagree by the difference of the places. Equal
disagreements are ordered by the difference of the standardized scores (the scores less their mean, over their standard
deviation in the group).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from flowfleet.api.samples import Sample
from flowfleet.ranks import ranks

Group = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Place of a sample in its group, by one scorer."""

    scorer: str
    is_shadow: bool
    score: float
    rank: float
    """1 is the highest score; ties share their mean."""
    of: int
    """Members that it scored."""
    share: float
    """0 for the lowest, 1 for the highest."""
    standardized: float


@dataclass(frozen=True)
class Disagreement:
    sample: Sample
    higher: Place
    """Place by the scorer that ranks it higher."""
    lower: Place

    @property
    def size(self) -> tuple[float, float]:
        """Difference of the places, 0 to 1, and of the standardized scores, both without their rounding errors."""
        standardized = abs(self.higher.standardized - self.lower.standardized)
        return round(self.higher.share - self.lower.share, 9), round(standardized, 9)


def rewards_of(sample: Sample) -> dict[str, float]:
    """Reward → score of those that gave one. A component is named after its reward and a dot."""
    names = sample.scores
    return {
        name: score
        for name, score in names.items()
        if score is not None and not any(name.startswith(f"{other}.") for other in names)
    }


def disagreements(samples: Sequence[Sample], beside: Mapping[str, str] | None = None) -> list[Disagreement]:
    """Finds for each sample the two scorers that disagree most about it, the greatest disagreement first.

    Each reward is compared with each other one, and a shadow with the reward that it is `beside`, or with every one
    where that is not known. Samples of one step and group are compared; if no group of a step has two members, as in a
    validation, the step is one group. Samples on which all scorers agree are left out. Raises ValueError where no two
    scorers scored the same sample.
    """
    largest: list[Disagreement] = []
    compared = False
    for members in _groups(samples):
        places = _places(members)
        for position, sample in enumerate(members):
            known = [by_place[position] for by_place in places if position in by_place]
            pairs = [pair for pair in combinations(known, 2) if _compared(*pair, beside or {})]
            compared = compared or bool(pairs)
            if pairs:
                ordered = (sorted(pair, key=lambda place: (place.share, place.standardized)) for pair in pairs)
                found = (Disagreement(sample, higher, lower) for lower, higher in ordered)
                largest.append(max(found, key=lambda item: item.size))
    if not compared:
        raise ValueError(
            "no two scorers scored the same sample: a job of two rewards, or one with a shadow, is needed; what is "
            "held_out_only scores those of --purpose validate"
        )
    return sorted((item for item in largest if item.size > (0.0, 0.0)), key=lambda item: item.size, reverse=True)


def _groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    steps: dict[int, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        steps[sample.step][sample.group].append(sample)
    groups_of_steps: list[list[Sample]] = []
    for groups in steps.values():
        are_single = all(len(members) == 1 for members in groups.values())
        groups_of_steps += [list(chain(*groups.values()))] if are_single else groups.values()
    return groups_of_steps


def _places(members: Sequence[Sample]) -> list[dict[int, Place]]:
    """Position in `members` → place, for each sample that has a score."""
    scores: dict[tuple[bool, str], dict[int, float]] = defaultdict(dict)
    for position, sample in enumerate(members):
        for name, score in rewards_of(sample).items():
            scores[False, name][position] = score
        for name, shadow in sample.shadow.items():
            if shadow is not None:
                scores[True, name][position] = shadow
    return [_places_of(name, is_shadow, by_position) for (is_shadow, name), by_position in scores.items()]


def _places_of(name: str, is_shadow: bool, scores: Mapping[int, float]) -> dict[int, Place]:
    values = np.array(list(scores.values()), np.float64)
    num, differ = len(values), bool(values.min() < values.max())
    standardized = (values - values.mean()) / values.std() if differ else np.zeros(num)
    ranked = ranks(values)
    shares = (ranked - 1.0) / (num - 1.0) if num > 1 else np.full(num, 0.5)
    return {
        position: Place(
            scorer=name,
            is_shadow=is_shadow,
            score=scores[position],
            rank=num + 1.0 - float(ranked[at]),
            of=num,
            share=float(shares[at]),
            standardized=float(standardized[at]),
        )
        for at, position in enumerate(scores)
    }


def _compared(first: Place, second: Place, beside: Mapping[str, str]) -> bool:
    """Two rewards always, two shadows never."""
    if first.is_shadow and second.is_shadow:
        return False
    shadow, reward = (first, second) if first.is_shadow else (second, first)
    return not shadow.is_shadow or beside.get(shadow.scorer, reward.scorer) == reward.scorer
