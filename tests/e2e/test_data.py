"""A table of prompts through all services: metadata reach the reward, and each prompt is guided by its own negative
prompt in rollout and trainer."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Fleet, assert_accounted


@pytest.mark.long
def test_prompts_of_a_csv_with_negative_prompts_of_their_own(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    prompts = (ROOT / "recipes/tiny/prompts/train.txt").read_text().splitlines()[:8]
    path = tmp_path / "train.CSV"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["caption", "negative_prompt", "source"])
        for number, prompt in enumerate(prompts):
            table.writerow([prompt, "a blurred photograph, " * (number % 3), "tiny"])
    settings = {"data.train": str(path), "data.prompt_column": "caption", "rollout.guidance_scale": 2.0}
    job = small_job(**settings, **{"data.validation": None, "schedule.steps": 2, "rollout.prompts_per_step": 4})
    done = fleet.run(job)
    assert_accounted(done, 2 * 24)
    rows = fleet.metrics(done)
    for row in rows:  # promise 7 of docs/architecture.md with rows of several negative prompts
        assert row.values["rollout_corr/ratio_min"] == row.values["rollout_corr/ratio_max"] == 1.0
    assert {sample.prompt for sample in fleet.client.samples(done.id)} == set(prompts)
