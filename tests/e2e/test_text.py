"""A job on a model that writes text, by real processes: exact log-probs, learning, an export that loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Fleet, assert_accounted
from tests.tiny_models.text import save_text_model

pytestmark = pytest.mark.long

STEPS, SAMPLES = 5, 24
REWARD = """
def digits(text, prompt, metadata):
    return sum(character.isdigit() for character in text) / max(1, len(text))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Rewards the share of digits."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "my_rewards.py").write_text(REWARD)
    settings = f"function=my_rewards:digits,path={folder},text=true,score_min=0,score_max=1"
    options = {"rewards": (f"digits=python:{settings}",), "model": str(model), "engine": "transformers"}
    with make_fleet(**options) as running:
        yield running


@pytest.fixture(scope="module")
def text_job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """5 steps of 4 prompts × 6 texts in two updates."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "train.txt").write_text("\n".join(f"{a}+{b}=?" for a in range(3) for b in range(4)))
    return {
        "name": "text",
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "train.txt"), "validation": str(folder / "train.txt")},
        "rewards": {"digits": {}},
        "algorithm": {"name": "grpo", "kl_coef": 0.01},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 6,
            "batch_size": 12,
            "sequence": {"max_tokens": 8},
        },
        "trainer": {
            "threads": 1,
            "deterministic": True,
            "lora": {"rank": 4, "alpha": 8.0},
            "optimizer": {"lr": 2e-2},
        },
        "schedule": {"steps": STEPS, "save_every": 4, "validate_every": 5},
    }


def test_a_job_runs_with_exact_log_probs_and_exports_an_adapter(
    fleet: Fleet, text_job: dict[str, Any], model: Path
) -> None:
    job = fleet.run(text_job)
    assert_accounted(job, STEPS * SAMPLES)
    rows = fleet.metrics(job)
    assert [row.values["rollout_corr/exact"] for row in rows] == [1.0] * STEPS
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.load_adapter(job.results["model"])
    rewards = [row.values["critic/rewards/mean"] or 0.0 for row in rows]
    assert rewards[-1] > rewards[0], "digits are rewarded"
