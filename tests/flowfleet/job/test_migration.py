"""Jobs that release 560f105e stored are read as what they were; a key still finds them."""

from __future__ import annotations

import pytest

from flowfleet.algorithms.registry import ALGORITHMS
from flowfleet.job.migration import ADVICE, is_first_format, migrated, today
from flowfleet.job.spec import JobSpec, parse_job
from services.controller.store.records import is_upgraded
from tests.flowfleet.job.stored import CHANGED, GONE, JOBS, stored


def test_the_fixture_has_a_job_of_every_algorithm() -> None:
    assert ALGORITHMS.keys() <= JOBS.keys() | {"cispo"}


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_stored_job_is_the_one_that_was_submitted(name: str) -> None:
    spec = JobSpec.model_validate(stored(JOBS[name]))
    assert not is_first_format(spec.model_dump(mode="json"))
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    submitted = JOBS[name]["submitted"]
    if name not in CHANGED:
        assert parse_job(submitted) == spec


@pytest.mark.parametrize("name", sorted(JOBS.keys() - CHANGED))
def test_a_file_that_is_submitted_again_is_the_same_job(name: str) -> None:
    assert is_upgraded(parse_job(JOBS[name]["submitted"]), stored(JOBS[name]), format=1)


def test_what_replaced_a_setting_keeps_its_behavior() -> None:
    assert JobSpec.model_validate(stored(JOBS["counted drops"])).rollout.max_refills == 0
    data = JobSpec.model_validate(stored(JOBS["sources"])).data
    assert [source.columns.prompt for source in data.each] == ["caption", "caption"]


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_changed_setting_that_is_gone_is_a_reason_not_to_continue(name: str) -> None:
    spec, reasons = migrated(stored(GONE[name]))
    assert [reason.startswith(f"{name} = ") and reason.endswith(ADVICE) for reason in reasons] == [True]
    assert JobSpec.model_validate(spec).name == "job"
    with pytest.raises(ValueError, match=name):
        JobSpec.model_validate(stored(GONE[name]))
    assert parse_job(today(stored(GONE[name]))).name == "job"  # a new job continues without it


def test_a_setting_of_another_loss_is_refused_however_it_is_written() -> None:
    whole = stored(JOBS["flow_grpo"])
    with pytest.raises(ValueError, match=r"algorithm\.beta has no effect with algorithm\.loss = flow_grpo"):
        parse_job(whole | {"algorithm": whole["algorithm"] | {"beta": 3.0}})
