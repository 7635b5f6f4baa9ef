"""Jobs trained by VeOmni, in an environment of its own, through a fleet: the curve of the trainer's own engine, also
where a rank is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e import test_text as text
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.test_kills import curve, kill_trainer_rank
from tests.services.trainer.test_veomni import PYTHON, pytestmark
from tests.waiting import wait_until

__all__ = ["pytestmark"]
model, reward, text_job = text.model, text.reward, text.text_job


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], model: Path, reward: Path) -> Iterator[Fleet]:
    settings = f"function=my_rewards:digits,path={reward.parent},text=true,score_min=0,score_max=1"
    options = {"rewards": (f"digits=python:{settings}",), "model": str(model), "engine": "transformers"}
    with make_fleet(**options, trainer_python=PYTHON) as running:
        yield running


@pytest.fixture(scope="module")
def veomni_job(text_job: dict[str, Any]) -> dict[str, Any]:
    return text_job | {"name": "veomni", "trainer": text_job["trainer"] | {"backend": "veomni"}}


def test_the_curve_is_that_of_fsdp_over_seeds(
    fleet: Fleet, text_job: dict[str, Any], veomni_job: dict[str, Any]
) -> None:
    for seed in range(3):
        plain, job = (fleet.run(each | {"seed": seed}) for each in (text_job, veomni_job))
        assert_accounted(job, text.STEPS * text.SAMPLES)
        exact, of_fsdp = (
            [row.values["rollout_corr/exact"] or 0.0 for row in fleet.metrics(each)] for each in (job, plain)
        )
        assert exact == of_fsdp
        assert min(exact) > 0.95  # transformers samples: a sequence may round otherwise in a packed row
        for mine, theirs in zip(curve(fleet, job), curve(fleet, plain), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        adapters = [load_file(next(Path(each.results["model"]).glob("*.safetensors"))) for each in (plain, job)]
        assert adapters[0].keys() == adapters[1].keys()
        gap = max(float((tensor - adapters[1][name]).abs().max()) for name, tensor in adapters[0].items())
        print(f"seed {seed}: adapters differ by {gap:.1e}")
        assert gap < 1e-4


def test_a_job_survives_the_kill_of_a_rank(fleet: Fleet, veomni_job: dict[str, Any]) -> None:
    undisturbed = curve(fleet, fleet.run(veomni_job))
    client, job = fleet.client, fleet.client.submit(veomni_job)
    wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == "train")
    kill_trainer_rank(fleet, job)
    job = client.wait(job.id, 240)
    assert_accounted(job, text.STEPS * text.SAMPLES)
    assert curve(fleet, job) == undisturbed
