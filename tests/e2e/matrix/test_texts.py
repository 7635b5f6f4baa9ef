"""Models that write text × algorithms, end to end through the services: two steps each, log-probs equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import TEXTS, cases, check
from tests.e2e.matrix.test_papers import check_recipe, make_job, recipes

pytestmark = pytest.mark.long

REWARD = """
def letters(text, prompt, metadata):
    return sum(map(ord, text)) % 10 / 10
"""


ROUNDING = 1e-6
"""A rollout decodes token by token, and a trainer reads packed sequences: float32 sums may end a bit or two apart."""
VLLM_CASES = [("qwen3", "gspo", "lora"), ("qwen3_moe", "grpo", "full"), ("thinker", "gspo", "lora")]
TOLERANCE = 1e-4
"""Ratios between the trainer's log-probs and vLLM's, in float32, are that near 1."""


@pytest.fixture(scope="module")
def fleet(
    make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "my_rewards.py").write_text(REWARD)
    settings = f"function=my_rewards:letters,path={folder},text=true,score_min=0,score_max=1"
    with make_fleet(rewards=(f"letters=python:{settings}",), model=None, engine=request.param) as running:
        yield running


@pytest.mark.parametrize("fleet", ["transformers"], indirect=True)
@pytest.mark.parametrize(("kind", "algorithm", "mode"), cases(TEXTS))
def test_the_algorithm_trains_the_model(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    check(fleet, checkpoint_of(kind), data, algorithm, mode, tolerance=ROUNDING)


@pytest.mark.parametrize("fleet", ["transformers"], indirect=True)
@pytest.mark.parametrize("name", recipes(writes=True))
def test_the_recipe_of_a_paper_runs(fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, name: str) -> None:
    check_recipe(fleet, make_job(name, checkpoint_of, data))


@pytest.mark.parametrize("fleet", ["vllm"], indirect=True)
@pytest.mark.parametrize(("kind", "algorithm", "mode"), VLLM_CASES)
def test_vllm_samples_for_the_algorithm(
    fleet: Fleet, checkpoint_of: Callable[[str], Path], data: Path, kind: str, algorithm: str, mode: str
) -> None:
    """Weights and adapters reach vLLM's layers: the second step's ratios hold as the first's do."""
    check(fleet, checkpoint_of(kind), data, algorithm, mode, tolerance=TOLERANCE)
