"""Priority class, queue and topology that a job asks for, and what its operator allows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import JobSpec, parse_job
from services.controller.platforms.kubernetes.template import choice_problem, parse_template
from tests.services.controller.platforms.kubernetes.test_placement import JOB, TEMPLATE


def spec_of(**asked: str) -> JobSpec:
    return parse_job({**JOB, "trainer": {"kubernetes": asked}})


def template_of(**annotations: str) -> dict[str, Any]:
    template = copy.deepcopy(TEMPLATE)
    template["metadata"]["annotations"] |= {f"flowfleet.io/{name}": value for name, value in annotations.items()}
    template["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "default"}
    pod_annotations = {"a": "b", "kueue.x-k8s.io/podset-preferred-topology": "topology.kubernetes.io/rack"}
    template["spec"]["template"]["metadata"] = {"annotations": pod_annotations}
    return template


def render(template: dict[str, Any], **asked: str) -> dict[str, Any]:
    return parse_template(template).render("job", spec_of(**asked), name="f-1", labels={}, owner={})


ALLOWED = {"priority-classes": "low,high", "queues": "team-a"}


def test_a_job_gets_what_it_asks_for_and_is_allowed() -> None:
    made = render(template_of(**ALLOWED), priority_class="high", queue="team-a", required_topology="example.com/block")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert made["spec"]["suspend"] is True
    pod = made["spec"]["template"]
    assert pod["spec"]["priorityClassName"] == "high"
    required = {"kueue.x-k8s.io/podset-required-topology": "example.com/block"}
    assert pod["metadata"]["annotations"] == {"a": "b", **required}, "it replaces the chart's wish"


def test_a_job_that_asks_for_nothing_has_the_charts() -> None:
    made = render(template_of(**ALLOWED))
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"
    assert "priorityClassName" not in made["spec"]["template"]["spec"]
    assert (
        made["spec"]["template"]["metadata"]["annotations"]
        == template_of()["spec"]["template"]["metadata"]["annotations"]
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"priority_class": "system-node-critical"},
            "priority_class = 'system-node-critical': jobs may name low, high here",
        ),
        (
            {"queue": "team-b"},
            "queue = 'team-b': jobs may name team-a here; the operator lists them in the chart's trainer.allowed",
        ),
    ],
)
def test_what_the_operator_does_not_list_is_refused_at_submit_and_at_launch(
    asked: dict[str, str], words: str, tmp_path: Path
) -> None:
    template = tmp_path / "trainer.yaml"
    template.write_text(json.dumps(template_of(**ALLOWED)))
    assert words in str(choice_problem(spec_of(**asked), template))
    assert choice_problem(spec_of(**asked), None) is None, "one machine does not read it"
    with pytest.raises(ValueError, match="jobs may name"):
        render(template_of(**ALLOWED), **asked)
    with pytest.raises(ValueError, match="jobs may name none here"):
        render(template_of(), **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"queue": "Team A"}, "give up to 63 lowercase letters"),
        ({"priority_class": ""}, "give up to 63 lowercase letters"),
        ({"required_topology": "a/b/c"}, "give the name of a label of nodes"),
        ({"required_topology": "a", "preferred_topology": "b"}, "exclude each other: leave one of them out"),
        ({"topology": "rack"}, "topology"),
    ],
)
def test_bad_input_is_refused_in_words(asked: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.kubernetes") as refused:
        spec_of(**asked)
    assert words in str(refused.value)
