"""Samples are counted by identity: what the trainer was asked for, else what the job's records say."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flowfleet.api.jobs import Job, Progress
from flowfleet.api.samples import Sample
from flowfleet.job.spec import JobSpec
from flowfleet.proto.common_pb2 import Sample as SampleMessage
from flowfleet.proto.common_pb2 import SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from tests.faults.account import account
from tests.faults.job import make_job
from tests.faults.targets import identities


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    """Steps of two groups of three."""
    return make_job("lora", 2)


def job(trained: int, **dropped: int) -> Job:
    results = {"samples_trained": trained, "samples_dropped": dropped}
    progress = Progress(step=2, steps=2)
    ended = {"id": "j", "name": "n", "status": "succeeded", "desired": "running", "spec": {}}
    return Job.model_validate(ended | {"created_at": datetime.now(UTC), "progress": progress, "results": results})


def names(step: int, *left_out: str) -> list[str]:
    everything = [f"{step}/{group}/{index}" for group in range(2) for index in range(3)]
    return [name for name in everything if name not in left_out]


def records(step: int, *dropped: str) -> list[Sample]:
    found = []
    for name in names(step):
        group, index = map(int, name.split("/")[1:])
        reason, reward = ("bad", None) if name in dropped else ("", 0.5)
        found.append(Sample(step=step, group=group, index=index, prompt="p", reward=reward, drop_reason=reason))
    return found


def test_everything_was_trained_once(spec: JobSpec) -> None:
    found = account(spec, job(12), [], {0: names(0), 1: names(1)}, ())
    assert (found.asked, found.trained, found.doubled, found.lost, found.drops_found) == (12, 12, 0, 0, ())
    assert found.are_exact


def test_a_drop_is_found_by_its_identity(spec: JobSpec) -> None:
    found = account(spec, job(11, bad=1), [], {0: names(0), 1: names(1, "1/0/2")}, ("1/0/2",))
    assert found.drops_found == ("1/0/2",)
    assert found.are_exact
    assert not account(spec, job(11, bad=1), [], {0: names(0), 1: names(1, "1/0/2")}, ()).are_exact


def test_records_stand_in_for_a_request_that_was_not_seen(spec: JobSpec) -> None:
    found = account(spec, job(11, bad=1), [*records(0), *records(1, "1/1/1")], {0: names(0)}, ("1/1/1",))
    assert found.drops_found == ("1/1/1",)
    assert found.are_exact


def test_a_step_whose_records_are_lost_is_not_doubled(spec: JobSpec) -> None:
    assert account(spec, job(12), records(0), {0: names(0), 1: names(1)}, ()).are_exact


def test_a_sample_that_is_trained_twice_is_doubled(spec: JobSpec) -> None:
    twice = [*names(1), "0/0/0"]
    assert account(spec, job(12), [], {0: names(0), 1: twice}, ()).doubled == 1
    assert account(spec, job(14), [], {0: names(0), 1: names(1)}, ()).doubled == 2


def test_a_sample_that_nobody_counts_is_lost(spec: JobSpec) -> None:
    found = account(spec, job(11), [], {0: names(0), 1: names(1, "1/0/0")}, ())
    assert (found.lost, found.drops_found) == (1, ("1/0/0",))


def test_identities_come_from_the_stored_request() -> None:
    ids = [SampleId(job_id="j", step=3, group=group, index=1) for group in range(2)]
    request = TrainStepRequest(samples=[TrainSample(sample=SampleMessage(id=one)) for one in ids])
    assert identities(request.SerializeToString()) == ["3/0/1", "3/1/1"]
