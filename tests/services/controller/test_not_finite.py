"""Samples that a replica could not make are dropped, and a job that learns nothing pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from services.controller.job.commands.train import taught_nothing
from tests.services.controller.scripted import ScriptedReward, scripted_fleet


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"actor/skipped_updates": 2.0}, True),
        ({"actor/skipped_updates": 1.0, "actor/grad_norm": 3.0, "actor/loss": 1.0}, False),
        ({"actor/skipped_updates": 2.0, "actor/loss": 1.0}, True),
        ({"actor/skipped_updates": 2.0, "actor/loss": 1.0, "actor/loss_scale": 1024.0}, False),  # it is halved
        ({"actor/skipped_updates": 2.0, "actor/loss_scale": 1024.0}, True),
        ({"actor/skipped_updates": 0.0, "actor/grad_norm": 0.0}, False),
        ({}, False),
    ],
)
def test_a_step_taught_nothing_where_no_gradient_was_finite(metrics: dict[str, float], expected: bool) -> None:
    assert taught_nothing(metrics) is expected


@pytest.mark.parametrize("failing", [{1}, {0, 1}])
async def test_a_sample_of_nan_is_dropped_and_a_step_of_them_pauses(
    failing: set[int], redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (tmp_path / "prompts.txt").write_text('A red sign that says "K7QX"\n')
    settings: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "rewards": {"ocr": {}},
        "data": {"train": str(tmp_path / "prompts.txt")},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_refills": 0},
        "schedule": {"steps": 1},
    }

    rewards = {"ocr": ScriptedReward(lambda sample: 0.5)}
    async with scripted_fleet(redis_url, tmp_path / "state", rewards) as fleet:
        fleet.rollout.not_finite = failing
        record = await fleet.submit(settings)
        ends = (JobStatus.PAUSED, JobStatus.SUCCEEDED)
        record = await fleet.reached(record.id, lambda record: record.status in ends)
        events = await fleet.store.events.read(record.id)
        assert [event.data["reason"] for event in events if event.type == "gave_up"] == ["its latents are NaN"]
        if len(failing) == 2:
            assert "No sample could be made: the job's events `gave_up` say why" in record.reason
        else:
            assert record.results["samples_dropped"] == {"rollout_failed": 1}
