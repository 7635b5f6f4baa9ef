"""A researcher's afternoon: train, stop early, take the model home, load it in plain diffusers, continue with another
algorithm and with all that the first job knew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file

from flowfleet.api.jobs import Job
from flowfleet.client.continuing import continued
from tests.e2e.conftest import ROOT, Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def test_a_finished_job_is_taken_home_and_continued(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    client = fleet.client
    settings = {"schedule.steps": 1000, "schedule.save_every": 2, "schedule.validate_every": 2}
    first = client.submit(small_job(**settings, **{"schedule.keep_best": 1, "schedule.keep_last": 1}))
    wait_until(lambda: client.job(first.id).progress.step >= 4, 240)
    client.finish(first.id)
    first = client.wait(first.id, 240)
    assert first.status == "succeeded", first.reason
    assert 4 <= first.progress.step == first.progress.steps < 20
    assert [checkpoint.step for checkpoint in client.checkpoints(first.id)][-1] == first.progress.step

    folder = tmp_path / "home"
    found = client.download_model(first.id, folder)
    assert (found.step, found.kind, found.weights) == (first.progress.step, "adapter", "trained")
    assert "## Held-out prompts, before and after" in (folder / "README.md").read_text()
    adapter = load_file(folder / "pytorch_lora_weights.safetensors")
    assert any(name.endswith("lora_B.weight") and tensor.abs().max() > 0 for name, tensor in adapter.items())
    pipeline: Any = QwenImagePipeline.from_pretrained(ROOT / "recipes/tiny/model")
    pipeline.load_lora_weights(folder)
    loaded = {name: tensor for name, tensor in pipeline.transformer.state_dict().items() if ".lora_B." in name}
    assert loaded
    for name, tensor in loaded.items():
        assert torch.equal(tensor, adapter[f"transformer.{name.replace('.default_0', '')}"])

    other = small_job(**{"schedule.steps": 1, "algorithm.name": "diffusion_nft", "model.adapter": f"job:{first.id}"})
    other["rollout"].pop("noise", None)
    other["rollout"].pop("window", None)
    other["algorithm"] = {"name": "diffusion_nft"}
    assert_goes_on(client.wait(client.submit(other).id, 240), first)
    resumed = continued(client, first.id, changes=["schedule.steps=1", "schedule.keep_best=0"])
    assert_goes_on(client.wait(client.submit(resumed).id, 240), first)


def assert_goes_on(job: Job, before: Job) -> None:
    assert job.status == "succeeded", job.reason
    assert job.progress.step == 1
    assert job.id != before.id
