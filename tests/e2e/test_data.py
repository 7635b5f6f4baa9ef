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


@pytest.mark.long
def test_uploaded_sources_with_rewards_of_their_own(
    make_fleet: Callable[..., Any], small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Two sources, one of them uploaded: signs are read, everything else is only weighed as JPEG."""
    rewards = {"ocr", "jpeg_compressibility"}
    signs = (ROOT / "recipes/tiny/prompts/train.txt").read_text().splitlines()[:6]
    (tmp_path / "signs.txt").write_text("\n".join(signs))
    (tmp_path / "plain.csv").write_text("prompt,kind\n" + "".join(f"a plain wall {k},wall\n" for k in range(3)))
    job = small_job(**{"schedule.steps": 2, "rollout.prompts_per_step": 4})
    with make_fleet(rewards=("ocr", "jpeg_compressibility")) as fleet:
        plain = fleet.client.upload(tmp_path / "plain.csv")
        own = {"name": "signs", "path": str(tmp_path / "signs.txt"), "rewards": {"ocr": 1.0}, "weight": 3}
        uploaded = {"name": "plain", "path": plain, "validation": plain, "rewards": {"jpeg_compressibility": 0.5}}
        job["data"] = {"sources": [own, uploaded]}
        job["rewards"] = {"ocr": {}, "jpeg_compressibility": {}}
        done = fleet.run(job)
        assert done.status == "succeeded", done.reason
        assert_accounted(done, 2 * 24)
        samples = list(fleet.client.samples(done.id))
        assert {sample.source for sample in samples} == {"signs", "plain"}
        for sample in samples:
            assert set(sample.scores) & rewards == ({"ocr"} if sample.source == "signs" else {"jpeg_compressibility"})
        for row in fleet.metrics(done):
            assert row.values["critic/sources/signs/num_samples"] == 18
            assert row.values["critic/sources/plain/num_samples"] == 6
        held = list(fleet.client.samples(done.id, purpose="validate"))
        assert {sample.source for sample in held} == {"plain"}
