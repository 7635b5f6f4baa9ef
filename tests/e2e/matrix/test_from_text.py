"""Models that paint from text × algorithms, end to end: two steps each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.models.registry import FAMILIES, family_of
from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import (
    EDITS_AND_VIDEOS,
    FROM_TEXT,
    PIPELINES,
    TEXTS,
    THROUGH_SERVICES,
    cases,
    check,
    every_case,
)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "algorithm", "mode"), cases(FROM_TEXT))
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode)


def test_the_matrix_has_every_family(checkpoint_of: Callable[[str], Path]) -> None:
    """Cheap, so run always: a family without a tiny checkpoint would be left out unseen."""
    kinds = FROM_TEXT + EDITS_AND_VIDEOS + TEXTS
    assert {kind: family_of(checkpoint_of(kind)).pipeline for kind in kinds} == PIPELINES
    assert set(PIPELINES.values()) == set(FAMILIES)


def test_pairs_through_services_are_pairs_of_the_matrix() -> None:
    """One of each kind of loss that reads rewards."""
    whole = [case for kind in PIPELINES for case in every_case(kind, writes=kind in TEXTS)]
    assert set(THROUGH_SERVICES) <= set(whole)
    kinds = [LOSSES[ALGORITHMS[algorithm].loss].kind for _, algorithm, _ in THROUGH_SERVICES]
    assert kinds == ["policy", "matching", "gradient", "sequence"]
