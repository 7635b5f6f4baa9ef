"""A reward that is none of this repository's Python: the Node example trains the tiny model through all services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flowfleet.api.jobs import Job
from flowfleet.job.spec import read_job_file
from tests.e2e.conftest import ROOT, Fleet
from tests.examples import reward_node

STEPS = 4
NUM_PROMPTS = 64
CHANCE = 5.0
"""Standard errors that the mean of the paired differences must be above zero: one time in three million by chance."""


def held_out(fleet: Fleet, job: Job, version: int, score: str) -> NDArray[np.float64]:
    """(64,) of a score of the held-out prompts, each with the same noise at every version."""
    samples = fleet.client.samples(job.id, purpose="validate", step=version)
    by_prompt = {(sample.group, sample.index): sample.scores[score] for sample in samples}
    return np.array([by_prompt[place] for place in sorted(by_prompt)], np.float64)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tiny_model_learns_what_a_service_on_node_rewards(make_fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Once brighter and once darker from the same seed, so that no drift of its own can pass for learning."""
    prompts = tmp_path / "validation.txt"
    lines = (ROOT / "recipes/tiny/prompts/validation.txt").read_text().splitlines()
    prompts.write_text("\n".join(lines[:NUM_PROMPTS]))
    lighter: list[float] = []
    with reward_node.running() as (_, address), make_fleet(rewards=(f"colour={address}",)) as fleet:
        for target in ("#ffffff", "#000000"):
            spec = read_job_file(reward_node.EXAMPLE / "job.toml")
            spec["model"]["path"] = str(ROOT / spec["model"]["path"])
            spec["data"] = {"train": str(ROOT / spec["data"]["train"]), "validation": str(prompts)}
            spec["rewards"]["colour"]["params"]["target"] = target
            spec["schedule"] |= {"steps": STEPS, "validate_every": STEPS}
            spec["trainer"]["threads"] = 1
            job = fleet.run(spec, timeout_s=800)
            assert job.status == "succeeded", job.reason
            gains = held_out(fleet, job, STEPS, "colour") - held_out(fleet, job, 0, "colour")
            assert gains.shape == (NUM_PROMPTS,)
            print(
                f"target {target}: held-out reward {gains.mean():+.4f} ± {gains.std(ddof=1) / np.sqrt(NUM_PROMPTS):.4f}"
            )
            assert gains.mean() > CHANCE * gains.std(ddof=1) / np.sqrt(NUM_PROMPTS)
            brightness = [held_out(fleet, job, version, "colour.brightness").mean() for version in (0, STEPS)]
            lighter.append(brightness[1] - brightness[0])
    assert lighter[0] > 0 > lighter[1]
