"""Models that edit pictures or paint videos × algorithms, end to end: two steps each.

A file of its own, so that another core can have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import EDITS_AND_VIDEOS, cases, check

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("kind", "algorithm", "mode"), cases(EDITS_AND_VIDEOS))
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode)
