"""Learning rates against diffusers' schedulers, update by update, and where a resumed job continues."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.optimization import get_scheduler

from flowfleet.job.spec import JobSpec
from services.trainer.step.learning_rate import learning_rate
from tests.services.trainer.steps import make_spec

STEPS, UPDATES, PASSES, LR = 6, 2, 3, 0.01
TOTAL = STEPS * UPDATES * PASSES


def spec_of(**optimizer: Any) -> JobSpec:
    return make_spec(
        Path("model"),
        schedule={"steps": STEPS},
        trainer={"updates_per_step": UPDATES, "passes": PASSES, "optimizer": {"lr": LR, **optimizer}},
    )


def all_of(spec: JobSpec) -> list[float]:
    return [learning_rate(spec, step, number) for step in range(STEPS) for number in range(UPDATES * PASSES)]


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_schedules_are_those_of_diffusers(ours: str, theirs: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=TOTAL)
    expected = []
    for _ in range(TOTAL):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert all_of(spec_of(lr_schedule=ours, warmup_updates=warmup)) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_without_a_schedule_the_rate_is_the_jobs_own() -> None:
    assert set(all_of(spec_of())) == {LR}
