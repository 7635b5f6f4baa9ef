"""Models that write text × algorithms, end to end through the services: two steps each, log-probs exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import TEXTS, cases, check

pytestmark = pytest.mark.long

REWARD = """
def letters(text, prompt, metadata):
    return sum(map(ord, text)) % 10 / 10
"""


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "my_rewards.py").write_text(REWARD)
    settings = f"function=my_rewards:letters,path={folder},text=true,score_min=0,score_max=1"
    with make_fleet(rewards=(f"letters=python:{settings}",), model=None, engine="transformers") as running:
        yield running


@pytest.mark.parametrize(("kind", "algorithm", "mode"), cases(TEXTS))
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode)
