"""A job whose lines have three sizes, through all services: exact log-probs, and equal weights after a kill."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.conftest import ROOT, Fleet, assert_accounted
from tests.e2e.test_damaged_checkpoints import exported
from tests.e2e.test_kills import kill_trainer_rank
from tests.waiting import wait_until

SIZES = ("64x64", "32x64", "64x32", None)
STEPS = 4


def write(path: Path, count: int) -> dict[str, str]:
    """Writes prompts of each size in turn; returns the size of each."""
    prompts = (ROOT / "recipes/tiny/prompts/train.txt").read_text().splitlines()[:count]
    sizes = {prompt: SIZES[number % len(SIZES)] for number, prompt in enumerate(prompts)}
    lines = [{"prompt": prompt, "shape": size} for prompt, size in sizes.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {prompt: size or SIZES[0] or "" for prompt, size in sizes.items()}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_lines_of_three_sizes(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], tmp_path: Path, algorithm: str
) -> None:
    sizes = write(tmp_path / "train.jsonl", 12)
    write(tmp_path / "validation.jsonl", 8)
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "validation")} | {"size_column": "shape"}
    job = small_job(data=data, **{"schedule.steps": STEPS, "schedule.save_every": 1})
    limits = {"clip_range": None, "clip_nats": 10.0}
    job["algorithm"] |= limits if algorithm == "flow_grpo" else {"name": algorithm, "clip_range": None}
    job["algorithm"] = {name: value for name, value in job["algorithm"].items() if value is not None}
    if algorithm != "flow_grpo":
        for name in ("window", "noise"):
            del job["rollout"][name]
    done = fleet.run(job)
    assert_accounted(done, STEPS * 24)
    for row in fleet.metrics(done) if algorithm == "flow_grpo" else ():
        assert row.values["rollout_corr/ratio_min"] == row.values["rollout_corr/ratio_max"] == 1.0
    seen: dict[int, set[str]] = {}
    for sample in fleet.client.samples(done.id):
        picture = Image.open(io.BytesIO(fleet.client.media(done.id, sample)))
        assert f"{picture.width}x{picture.height}" == sizes[sample.prompt]
        seen.setdefault(sample.step, set()).add(sizes[sample.prompt])
    assert max(map(len, seen.values())) > 1, "a step mixes sizes"
    killed = fleet.client.submit(job)
    wait_until(lambda: fleet.client.job(killed.id).progress.step >= 2)
    kill_trainer_rank(fleet, killed)
    again = fleet.client.wait(killed.id, 240)
    assert_accounted(again, STEPS * 24)
    assert exported(again) == exported(done)
