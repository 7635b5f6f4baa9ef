"""Models that write text × algorithms, end to end: two steps each, log-probs equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import LETTERS, ROUNDING, TEXTS, cases, check
from tests.e2e.matrix.conftest import FleetMaker
from tests.e2e.matrix.test_papers import check_recipe, make_job, recipes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def fleet(make_quick_fleet: FleetMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "my_rewards.py").write_text(LETTERS)
    settings = {"function": "my_rewards:letters", "path": str(folder), "text": True, "score_min": 0, "score_max": 1}
    with make_quick_fleet({"letters": ("python", settings)}, "transformers") as running:
        yield running


@pytest.mark.parametrize(("kind", "algorithm", "mode"), cases(TEXTS))
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode, tolerance=ROUNDING)


@pytest.mark.parametrize("name", recipes(writes=True))
def test_the_recipe_of_a_paper_runs(fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, name: str) -> None:
    check_recipe(fleet, make_job(name, checkpoint_of, data))
