"""The Job of a trainer: what the launcher puts in, and what a template must have."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.spec import JobSpec, parse_job
from services.controller.platforms.kubernetes.template import attempt_name, load_template, parse_template

JOB_ID = "0190a0b0-1234-7abc-8def-0123456789ab"
TEMPLATE: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
        "name": "f-trainer",
        "labels": {"app.kubernetes.io/part-of": "flowfleet"},
        "annotations": {
            "flowfleet.io/ranks-per-pod": "8",
            "flowfleet.io/accelerator": "nvidia.com/gpu",
            "flowfleet.io/drain-s": "20",
        },
    },
    "spec": {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/part-of": "flowfleet"}},
            "spec": {
                "subdomain": "f-trainer",
                "restartPolicy": "Never",
                "containers": [
                    {"name": "proxy", "image": "p"},
                    {"name": "trainer", "image": "t", "resources": {"limits": {"memory": "9Gi"}}},
                ],
            },
        },
    },
}
OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "f-controller", "uid": "u", "blockOwnerDeletion": False}


def spec(ranks: int, **trainer: Any) -> JobSpec:
    job = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
    return parse_job({**job, "trainer": {"world_size": ranks, **trainer}})


ENV = {"DIGEST": "abc"}


def render(ranks: int, template: Any = TEMPLATE, **trainer: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "f"}
    return parse_template(template).render(
        JOB_ID, spec(ranks, **trainer), name="f-1", labels=labels, owner=OWNER, env=ENV
    )


def trainer_of(job: dict[str, Any]) -> dict[str, Any]:
    found = job["spec"]["template"]["spec"]["containers"][1]
    assert found["name"] == "trainer"
    return dict(found)


def test_what_the_launcher_puts_in() -> None:
    job = render(16)
    every = {"app.kubernetes.io/part-of": "flowfleet", "app.kubernetes.io/instance": "f", "flowfleet.io/job": JOB_ID}
    assert job["metadata"]["name"] == "f-1"
    assert job["metadata"]["ownerReferences"] == [OWNER]
    assert job["metadata"]["labels"] == job["spec"]["template"]["metadata"]["labels"] == every
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    trainer = trainer_of(job)
    assert trainer["resources"]["limits"] == {"memory": "9Gi", "nvidia.com/gpu": "8"}
    assert trainer["env"] == [{"name": "DIGEST", "value": "abc"}]
    assert trainer["args"] == [
        "--nnodes=2",
        "--nproc-per-node=8",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv-backend=static",
        "--shutdown-timeout=30",
        "--rdzv-conf=timeout=86400",
        "--master-addr=f-1-0.f-trainer",
        "--master-port=29500",
        "--max-restarts=0",
        "-m",
        "services.trainer",
        *("--host", "0.0.0.0", "--port", "7000", "--health-port", "7001", "--metrics-port", "9470"),
        *("--sample-port", "7100", "--transfer-host", "$(POD_IP)", "--drain-s", "20"),
    ]


def test_all_else_stays_as_the_template_has_it_and_the_template_too() -> None:
    before = copy.deepcopy(TEMPLATE)
    job = render(8, threads=3)
    assert before == TEMPLATE
    assert job["spec"]["template"]["spec"]["containers"][0] == {"name": "proxy", "image": "p"}
    assert trainer_of(job)["env"] == [{"name": "OMP_NUM_THREADS", "value": "3"}, {"name": "DIGEST", "value": "abc"}]
    assert job["metadata"]["annotations"] == TEMPLATE["metadata"]["annotations"]


def test_variables_of_the_attempts_secret_replace_the_templates() -> None:
    template = copy.deepcopy(TEMPLATE)
    trainer = template["spec"]["template"]["spec"]["containers"][1]
    trainer["env"] = [{"name": "TOKEN", "value": "of all trainers"}, {"name": "KEPT", "value": "x"}]
    job = parse_template(template).render(JOB_ID, spec(1), name="f-1", labels={}, owner=OWNER, secrets=("TOKEN",))
    assert trainer_of(job)["env"] == [
        {"name": "KEPT", "value": "x"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "f-1", "key": "TOKEN"}}},
    ]


def test_on_cpus_there_is_no_limit_of_accelerators() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["metadata"]["annotations"]["flowfleet.io/accelerator"] = ""
    assert trainer_of(render(2, template))["resources"]["limits"] == {"memory": "9Gi"}


@given(st.integers(1, 512), st.integers(1, 16))
def test_ranks_are_shared_evenly_by_as_few_pods_as_can_be(ranks: int, limit: int) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["metadata"]["annotations"]["flowfleet.io/ranks-per-pod"] = str(limit)
    pods = parse_template(template).pods(ranks)
    assert ranks % pods == 0
    assert ranks // pods <= limit
    assert not [fewer for fewer in range(1, pods) if ranks % fewer == 0 and ranks // fewer <= limit]


@given(st.from_regex(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True))
def test_names_are_host_names_and_new_each_time(release: str) -> None:
    one, two = attempt_name(release, JOB_ID), attempt_name(release, JOB_ID)
    assert one != two
    assert len(f"{one}-9999") <= 63
    beginning, infix, _ = one.rpartition("-trainer-0123456789ab-")
    assert infix
    assert release.startswith(beginning)
    assert not beginning.endswith("-")


def without(place: str, value: Any = None) -> dict[str, Any]:
    template = copy.deepcopy(TEMPLATE)
    part: Any = template
    *path, last = place.split("/")
    for name in path:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return template


def annotated(annotations: dict[str, Any]) -> dict[str, Any]:
    return without("metadata/annotations", annotations)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (["a list"], "must be a Job of batch/v1"),
        (without("kind", "Pod"), "must be a Job of batch/v1"),
        (without("spec/completionMode"), "spec.completionMode must be Indexed"),
        (without("spec/backoffLimit", 3), "spec.backoffLimit must be 0"),
        (without("spec/template/spec/restartPolicy"), "spec.template.spec.restartPolicy must be Never"),
        (without("metadata/annotations"), "annotation flowfleet.io/ranks-per-pod must be a number, at least 1"),
        (
            annotated({"flowfleet.io/ranks-per-pod": "0"}),
            "flowfleet.io/ranks-per-pod must be a number, at least 1, not '0'",
        ),
        (annotated({"flowfleet.io/ranks-per-pod": 8}), "annotation flowfleet.io/drain-s must be a number, at least 0"),
        (
            annotated({"flowfleet.io/ranks-per-pod": 8, "flowfleet.io/drain-s": 0}),
            "annotation flowfleet.io/accelerator must be the name",
        ),
        (without("spec/template/spec/subdomain"), "must name the headless Service"),
        (without("spec/template/spec/containers", []), "must have one named trainer"),
        (without("spec", "x"), "spec.completionMode must be Indexed"),
    ],
)
def test_a_malformed_template_is_told(template: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text(json.dumps(template))
    with pytest.raises(ValueError, match=message) as refused:
        load_template(path)
    assert str(refused.value).startswith(f"--trainer-template {path}")


def test_a_template_that_is_no_file_or_no_yaml_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_template(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_template(tmp_path / "bad.yaml")
