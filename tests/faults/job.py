"""The job of a chaos run: tiny, and the same bits whatever happens to its processes.

A sample is made, and trained on, in a forward of its own: then its bits do not depend on which samples came with it,
and one that is made again after a fault is the one that was lost. A dropped sample is not replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.numpy import load_file

from flowfleet.job.files import RECIPES, prepare_job
from flowfleet.job.spec import JobSpec, parse_job
from tests.faults.reward import NAME

Mode = Literal["lora", "full"]
RECIPE: dict[Mode, Path] = {"lora": RECIPES / "tiny_ocr.toml", "full": RECIPES / "tiny_ocr_full.toml"}
MAX_BATCH = 1
"""Rows of a forward of the rollouts."""
TINY: dict[str, Any] = {
    "name": "chaos",
    "rollout.height": 32,
    "rollout.width": 32,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 3,
    "rollout.batch_size": 3,
    "rollout.num_inference_steps": 4,
    "rollout.window.size": 2,
    "trainer.world_size": 2,
    "trainer.threads": 1,
    "trainer.updates_per_step": 1,
    "schedule.save_every": 3,
    "schedule.keep_last": 3,
}
"""What the recipe is changed to, so that a step takes part of a second."""
EXACT: dict[str, Any] = {
    "rollout.max_refills": 0,
    "trainer.deterministic": True,
    "trainer.micro_batch_size": 1,
    "rewards": {NAME: {}},
    "data.validation": None,
    "schedule.max_staleness": 0,
    "timeouts.score_s": 10.0,
    "timeouts.publish_s": 60.0,
    "timeouts.train_step_s": 120.0,
    "timeouts.checkpoint_s": 120.0,
    "timeouts.generate_s": 120.0,
}
"""What any job is changed to."""


def make_job(mode: Mode, steps: int, hang_s: float = 8.0) -> JobSpec:
    """Returns the tiny job of a mode, with the settings that make its bits repeat."""
    data = prepare_job(RECIPE[mode], same_machine=True).model_dump(mode="json", exclude_unset=True)
    own = {"trainer.mode": mode, "timeouts.hang_s": hang_s, "schedule.steps": steps}
    return parse_job(changed(data, {**TINY, **EXACT, **own}))


def changed(job: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The job's mapping, in which these settings are replaced; their names are dotted."""
    for name, value in changes.items():
        *path, key = name.split(".")
        part = job
        for step in path:
            part = part.setdefault(step, {})
        part[key] = value
    return job


def weights_hash(model: Path) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors of an exported model or adapter."""
    total = hashlib.sha256()
    for file in sorted(model.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            total.update(f"{file.relative_to(model)} {name} {tensor.dtype} {tensor.shape}".encode())
            total.update(tensor.tobytes())
    return total.hexdigest()
