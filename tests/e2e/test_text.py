"""A job on a model that writes text, by real processes: exact log-probs, learning, an export that loads, and a reward
whose file is edited meanwhile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flowfleet.api.jobs import JobStatus
from flowfleet.cli import main as cli
from flowfleet.job.fingerprints import CHANGED
from tests.e2e.conftest import Fleet, assert_accounted
from tests.tiny_models.text import save_text_model
from tests.waiting import wait_until

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
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a reward that counts digits."""
    file = tmp_path_factory.mktemp("reward") / "my_rewards.py"
    file.write_text(REWARD)
    return file


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], model: Path, reward: Path) -> Iterator[Fleet]:
    """Rewards the share of digits."""
    settings = f"function=my_rewards:digits,path={reward.parent},text=true,score_min=0,score_max=1"
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


def test_an_edited_reward_pauses_a_job_until_it_is_reloaded(
    fleet: Fleet, text_job: dict[str, Any], reward: Path
) -> None:
    """It ends and is started again with the other file, as after a crash; `rewards reload` then is the user's word."""
    client, before = fleet.client, fleet.pid("reward-digits")
    job = client.submit(text_job | {"name": "edited", "schedule": {"steps": 30, "validate_every": 30}})
    wait_until(lambda: client.job(job.id).progress.step >= 1)
    reward.write_text(REWARD.replace("max(1,", "max(2,"))
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: client.job(job.id).status is JobStatus.PAUSED)
    reason = client.job(job.id).reason
    assert reason.startswith(f"rewards.digits: its file {CHANGED} (sha256:")
    assert "`flowfleet rewards reload digits`" in reason
    client.resume(job.id)
    wait_until(lambda: client.job(job.id).status is JobStatus.PAUSED and client.job(job.id).reason == reason)

    done = CliRunner().invoke(cli.app, ["rewards", "reload", "digits", "--state-dir", fleet.stack.state_dir, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"pid": fleet.pid("reward-digits")}
    assert fleet.pid("reward-digits") != before
    client.resume(job.id)
    at = client.job(job.id).progress.step
    wait_until(lambda: client.job(job.id).progress.step > at)
    reward.write_text(REWARD)  # of a job at work, on purpose: it does not pause
    done = CliRunner().invoke(cli.app, ["rewards", "reload", "digits", "--state-dir", fleet.stack.state_dir])
    assert done.exit_code == 0, done.output
    assert client.wait(job.id, 240).status == "succeeded", client.job(job.id).reason
    versions = {sample.step: sample.versions["digits"] for sample in client.samples(job.id)}
    assert len({*versions.values()}) == 2
    assert versions[0] == versions[max(versions)]
