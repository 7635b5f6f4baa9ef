"""People's votes as a reward, on whole stacks of real processes: they survive a killed controller, and they turn the
tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet
from tests.e2e.voter import Voter, train
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def reason(fleet: Fleet, job: Job) -> str:
    return fleet.client.job(job.id).reason


def test_votes_survive_a_killed_controller_and_train_by_their_export(
    make_fleet: Callable[..., Any], small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    settings = small_job(
        **{
            "rewards": {"human": {"params": {"votes_per_sample": "1"}}},
            "rollout.prompts_per_step": 2,
            "rollout.group_size": 3,
            "schedule.steps": 1,
        }
    )
    with make_fleet(rewards=("human", "ocr")) as fleet:
        client = fleet.client
        job = client.submit(settings)
        wait_until(lambda: "of 2 votes" in reason(fleet, job), timeout_s=240)
        (pair,) = client.next_votes(job.id, "ann", count=1).pairs
        client.vote(job.id, pair, "left", "ann")
        before = fleet.pid("controller")
        psutil.Process(before).kill()
        wait_until(lambda: fleet.pid("controller") != before, timeout_s=60)
        wait_until(lambda: "of 2 votes" in reason(fleet, job), timeout_s=60)
        voter = Voter(fleet.stack.url, job.id, 0.0, seed=1, most=100)
        voter.start()
        ended = client.wait(job.id, 240)
        voter.stopped.set()
        voter.join(30)
        assert voter.failure is None
        assert ended.status == "succeeded", ended.reason
        groups = list(client.votes(job.id))
        assert [one.complete for one in groups] == [True, True]
        assert "ann" in {vote.voter for one in groups for vote in one.votes}
        for sample in client.samples(job.id, step=0):
            assert sample.versions == {"human": "human 1"}
            assert sample.scores["human.votes"] >= 1
        assert ended.progress.samples_trained == 6

        found = client.export_preferences(job.id, tmp_path / "preferences")
        assert found.pairs > 0
        preferred = {"algorithm": {"name": "dpo"}, "data.train": str(tmp_path / "preferences/preferences.jsonl")}
        sizes = {"rollout.prompts_per_step": 2, "rollout.group_size": 2, "trainer.micro_batch_size": 4}
        learned = fleet.run(small_job(**preferred, **sizes, **{"schedule.steps": 1}))
        assert learned.progress.samples_trained == 4


def test_warm_votes_turn_the_model(tmp_path: Path) -> None:
    found = train(1, 500, tmp_path)
    assert found["votes"] <= 500
    assert found["rise_in_std_of_mean"] >= 2.0, found
