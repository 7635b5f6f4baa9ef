"""What pods say of themselves, as kubelets and schedulers write it, and what the user reads of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.platforms.kubernetes.pods import (
    ended_at,
    is_told,
    post_mortem,
    problem,
    shortage,
    unschedulable,
)

NO_GPU = (
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are "
    "available: 3 No preemption victims found for incoming pod."
)


def pod(phase: str = "Pending", index: int = 0, deleted: str = "", **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": f"p{index}",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    if deleted:
        metadata |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 30}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "trainer", "state": state}]}


def exited(code: int, at: str = "2026-01-01T00:00:10Z", reason: str = "Error", message: str = "") -> dict[str, Any]:
    return container(terminated={"exitCode": code, "finishedAt": at, "reason": reason, "message": message})


UNSCHEDULABLE: dict[str, Any] = {"conditions": [condition("PodScheduled", "False", "Unschedulable", NO_GPU)]}
BACK_OFF: dict[str, Any] = {
    "containerStatuses": [
        {
            "name": "ocr",
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
            "lastState": {"terminated": {"exitCode": 2, "reason": "Error", "message": "--scorer is missing\n"}},
        }
    ]
}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (pod("Running"), ""),
        (pod("Pending", **container(waiting={"reason": "ContainerCreating"})), ""),
        (pod("Pending", **UNSCHEDULABLE), "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        (pod("Pending", conditions=[condition("PodScheduled", "False", "SchedulingGated")]), "held back by a gate"),
        (
            pod("Pending", **container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling x"})),
            "ImagePullBackOff: Back-off pulling x",
        ),
        (pod("Running", **BACK_OFF), "CrashLoopBackOff: container ocr: exit code 2: --scorer is missing"),
        (
            pod("Failed", reason="Evicted", message="The node was low on memory."),
            "Evicted: The node was low on memory.",
        ),
        (pod("Failed", **exited(1, message="no\nspace")), "exit code 1: no space"),
        (pod("Failed", **exited(137, reason="OOMKilled")), "OOMKilled, exit code 137"),
    ],
)
def test_why_a_pod_does_not_run(seen: dict[str, Any], reason: str) -> None:
    assert reason in problem(seen)
    assert bool(problem(seen)) == bool(reason)


def test_a_shortage_is_the_reason_of_most_pods() -> None:
    every = [pod("Running"), *[pod("Pending", **UNSCHEDULABLE)] * 2, pod("Running", **BACK_OFF)]
    assert shortage(every) == "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. (2 of 4 pods)"
    assert shortage(every[:1]) == shortage([]) == ""
    assert [unschedulable(each) for each in every] == [False, True, True, False]


def test_a_pod_that_is_being_deleted_is_no_shortage() -> None:
    assert shortage([pod("Pending", deleted="2026-01-01T00:00:30Z", **UNSCHEDULABLE)]) == ""


def test_of_several_failures_the_first_is_the_cause() -> None:
    first = pod("Failed", 1, **exited(3, "2026-01-01T00:00:10Z", message="out of disk"))
    follower = pod("Failed", 0, **exited(1, "2026-01-01T00:00:12Z", message="rank 1 is gone"))
    ended_with_its_job = pod("Running", 2, deleted="2026-01-01T00:00:43Z")
    assert post_mortem([follower, ended_with_its_job, first]) == ("pod 1: exit code 3: out of disk", True)


REFUSED = exited(1, "2026-01-01T00:00:10Z", message="RuntimeError: Gloo connectFullMesh failed: Connection refused\n")
WORDS = "rank 1: ValueError: the noise has 3 steps"


def test_the_rank_that_told_its_own_error_is_the_cause_even_where_its_pod_ended_last() -> None:
    consequence = pod("Failed", 0, **REFUSED)
    same_second = pod("Failed", 1, **exited(1, "2026-01-01T00:00:10Z", message=WORDS))
    with_its_job = pod("Failed", 1, "2026-01-01T00:00:41Z", **exited(1, "2026-01-01T00:00:12Z", message=WORDS))
    for cause in (same_second, with_its_job):
        assert post_mortem([consequence, cause]) == (f"pod 1: exit code 1: {WORDS}", True)
        assert is_told([consequence, cause])


def test_what_a_deletion_makes_others_say_is_not_the_cause() -> None:
    deleted = pod("Running", 0, deleted="2026-01-01T00:00:40Z")
    follower = pod("Failed", 1, **exited(1, "2026-01-01T00:00:12Z", message=WORDS))
    assert not post_mortem([deleted, follower])[1]


def test_a_failure_without_words_is_told_once_every_pod_has_ended() -> None:
    consequence, runs = pod("Failed", 0, **REFUSED), pod("Running", 1, **container(running={}))
    assert not is_told([consequence, runs])
    assert is_told([consequence, pod("Failed", 1, **exited(137, reason="OOMKilled"))])
    assert is_told([runs, pod("Running", 0, deleted="2026-01-01T00:00:40Z")])


def test_an_eviction_is_the_cause_even_where_a_rank_ended_before() -> None:
    evicted = pod(
        "Failed",
        0,
        conditions=[condition("DisruptionTarget", "True", "EvictionByEvictionAPI")],
        **exited(143, "2026-01-01T00:00:20Z"),
    )
    follower = pod("Failed", 1, **exited(1, "2026-01-01T00:00:11Z"))
    why, own_fault = post_mortem([follower, evicted])
    assert (why, own_fault) == ("pod 0 was evicted or deleted: exit code 143", False)


def test_a_deleted_pod_is_the_cause_of_what_fails_after_it() -> None:
    deleted = pod("Running", 0, deleted="2026-01-01T00:00:40Z")
    assert ended_at(deleted) == "2026-01-01T00:00:10Z", "asked for 30 s before the grace ends"
    follower = pod("Failed", 1, **exited(1, "2026-01-01T00:00:12Z"))
    assert not post_mortem([deleted, follower])[1]
    assert post_mortem([]) == ("its pods were deleted", False)


STATES = st.fixed_dictionaries(
    {"name": st.just("c")},
    optional={
        "state": st.fixed_dictionaries(
            {},
            optional={
                "waiting": st.fixed_dictionaries({"reason": st.sampled_from(["CrashLoopBackOff", "Other"])}),
                "terminated": st.fixed_dictionaries({"exitCode": st.integers(0, 255)}),
            },
        ),
        "lastState": st.sampled_from([{}, {"terminated": {"exitCode": 1}}]),
    },
)


@given(
    st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Unknown"]),
    st.lists(STATES, max_size=3) | st.none(),
    st.lists(STATES, max_size=2) | st.none(),
    st.text(max_size=2000),
)
def test_whatever_is_missing_there_is_an_answer_of_one_line(phase: str, main: Any, init: Any, message: str) -> None:
    seen = pod(phase, containerStatuses=main, initContainerStatuses=init, message=message, reason="R" * bool(message))
    text = json.dumps([problem(seen), post_mortem([seen])[0], shortage([seen])])
    assert "\\n" not in text
    assert len(text) < 4000 * 6
