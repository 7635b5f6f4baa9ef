"""Seeded faults on a job, in both modes: nothing lost, nothing doubled, the weights of an undisturbed run.

CHAOS_FAULTS and CHAOS_SEED choose a longer run or another schedule.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.job import Mode, make_job
from tests.faults.run import can_mount, possible, run_under_faults, undisturbed_weights
from tests.faults.schedule import KINDS, Shape, make_schedule, poisons
from tests.faults.tools.clocks import find_library

FAULTS = int(os.environ.get("CHAOS_FAULTS", "0"))
SEED = int(os.environ.get("CHAOS_SEED", "17"))
HANG_S = 8.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600 + 25 * max(FAULTS, 12))]


@pytest.mark.parametrize(("mode", "num_faults"), [("lora", FAULTS or 12), ("full", FAULTS or 6)])
def test_a_job_survives_faults_with_the_same_weights(mode: Mode, num_faults: int, tmp_path: Path) -> None:
    library = find_library()
    kinds, skipped = possible(KINDS, has_clocks=library is not None, has_disk=can_mount(tmp_path / "probe"))
    print(f"skipped: {skipped}")
    spec = make_job(mode, 2, HANG_S)
    shape = Shape(spec.rollout.prompts_per_step, spec.rollout.group_size, spacing=3)
    schedule = make_schedule(num_faults, SEED, shape, kinds)
    spec = make_job(mode, shape.steps_for(num_faults), HANG_S)
    injected = poisons(schedule)

    outcome = run_under_faults(tmp_path, spec, schedule, library)
    assert [text for entry in outcome.entries for text in entry.failures] == []
    assert sum(entry.counted for entry in outcome.entries) == num_faults
    assert outcome.samples.are_exact, outcome.samples
    assert set(outcome.samples.drops_found) == set(injected)
    assert outcome.weights == undisturbed_weights(tmp_path / "undisturbed", spec, injected)
