"""Traces of a whole tiny job: its services are real processes, which export to a collector by OTLP over gRPC."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from flowfleet.api.jobs import Job
from flowfleet.process.traces import StepIds
from tests.collector import Collector, Seen, collector
from tests.e2e.conftest import Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.long

STEPS, GROUPS, SIZE = 2, 4, 6
CLIENT, SERVER = 3, 2
GENERATE, SCORE = "flowfleet.v1.RolloutService/Generate", "flowfleet.v1.RewardService/Score"
TRAIN, PUBLISH = "flowfleet.v1.TrainerService/TrainStep", "flowfleet.v1.TrainerService/PublishWeights"
UI = "https://traces.example.com/trace/{trace_id}"


@pytest.fixture(scope="module")
def seen() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], seen: Collector) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", seen.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("FLOWFLEET_TRACE_URL", UI)
        with make_fleet() as running:
            yield running


def job_of(small_job: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    """Two steps, each of which ends with a checkpoint and a validation."""
    every = {"schedule.steps": STEPS, "schedule.save_every": 1, "schedule.validate_every": 1}
    return small_job(**every, **changes)


def traces_of(seen: Collector, job: Job) -> dict[int, list[Seen]]:
    """Spans by step, once every service has sent its own. Fails for a span of the job in another trace."""
    ids = {StepIds.of(job.id, step).trace_hex: step for step in range(STEPS)}
    wait_until(lambda: len([span for span in seen.named("Export") if span["job"] == job.id]) == 1)
    found: dict[int, list[Seen]] = {step: [] for step in range(STEPS)}
    for span in seen.spans:
        if span.trace in ids:
            found[ids[span.trace]].append(span)
    strays = [s for s in seen.spans if (s.attributes or {}).get("flowfleet.job") == job.id and s.trace not in ids]
    assert not strays
    return found


def one(spans: list[Seen], name: str, **attributes: Any) -> Seen:
    (found,) = [s for s in spans if s.name == name and all(s[key] == value for key, value in attributes.items())]
    return found


def called(seen: Collector, parent: Seen, name: str) -> tuple[Seen, Seen]:
    """The one call of this name that a span made, at both ends."""
    (client,) = [span for span in seen.children(parent) if span.name == name]
    (server,) = seen.children(client)
    assert (client.kind, server.kind, server.name) == (CLIENT, SERVER, name)
    assert client.service == parent.service
    return client, server


def test_a_step_is_one_trace_through_all_services(fleet: Fleet, seen: Collector, small_job: Callable[..., Any]) -> None:
    job = fleet.run(job_of(small_job))
    assert job.status == "succeeded", job.reason
    for step, spans in traces_of(seen, job).items():
        root = one(spans, "step")
        assert (root.span, root.parent) == (f"{StepIds.of(job.id, step).span:016x}", "")
        assert root["samples.trained"] == GROUPS * SIZE
        known = {span.span for span in spans}
        assert len(known) == len(spans)
        assert {span.parent for span in spans} - known == {""}
        check_scores(seen, spans, step)
        _, trained = called(seen, one(spans, "TrainStep"), TRAIN)
        assert trained.service == "flowfleet-trainer"
        check_publishing(seen, one(spans, "Publish", version=step + 1))
        commands = Counter(span.name for span in seen.children(root))
        assert commands["Score"] == GROUPS
        assert {"Generate", "ComputeAdvantages", "Checkpoint", "Validate"} < commands.keys()
        assert ("Export" in commands) == (step == STEPS - 1)
        assert not [span.error for span in spans if span.error]


def check_scores(seen: Collector, spans: list[Seen], step: int) -> None:
    """Each group is scored by one call, whose command links to the calls that made its samples."""
    for group in range(GROUPS):
        command = one(spans, "Score", group=group)
        _, scored = called(seen, command, SCORE)
        assert scored.service == "flowfleet-reward"
        made = {(link.trace, link.span): link["samples"].split() for link in command.links}
        assert sorted(itertools.chain(*made.values())) == [f"{group}/{index}" for index in range(SIZE)]
        sampled = {(s.trace, s.span): s for s in spans if s.name == GENERATE and s.kind == SERVER}
        assert made.keys() <= sampled.keys()
        for place in made:
            (client,) = [span for span in spans if span.span == sampled[place].parent]
            (generate,) = [span for span in spans if span.span == client.parent]
            assert sampled[place].service == "flowfleet-rollout"
            assert (generate.name, generate["step"]) == ("Generate", step)
            assert group in generate["groups"]


def check_publishing(seen: Collector, command: Seen) -> None:
    """The trainer's own calls to replicas are below the controller's."""
    _, published = called(seen, command, PUBLISH)
    methods = ("InitWeightTransfer", "StartWeightUpdate", "FinishWeightUpdate")
    for method in methods:
        _, updated = called(seen, published, f"flowfleet.v1.RolloutService/{method}")
        assert updated.service == "flowfleet-rollout"


def test_a_restarted_controller_adds_to_the_same_trace(
    fleet: Fleet, seen: Collector, small_job: Callable[..., Any]
) -> None:
    """kill -9 once the controller has sent spans of a step that is not done."""
    job = fleet.client.submit(job_of(small_job, name="killed"))
    first, ids = fleet.pid("controller"), StepIds.of(job.id, 0)

    def commands() -> list[Seen]:
        return [s for s in seen.spans if s.trace == ids.trace_hex and s.parent == f"{ids.span:016x}"]

    wait_until(lambda: any(span.name == "Score" for span in commands()), 60)
    os.kill(first, signal.SIGKILL)
    ended = fleet.client.wait(job.id, 240)
    assert ended.status == "succeeded", ended.reason
    spans = traces_of(seen, ended)[0]
    trained = one(spans, "TrainStep")
    assert trained.pid not in (first, 0)
    assert {span.pid for span in commands()} == {first, trained.pid}
    root = one(spans, "step")
    assert root.pid == trained.pid
    assert root.start_ns <= min(
        span.start_ns for span in commands() if span.name == "Score"
    )  # the ledger knows when the step was opened


def test_rest_leads_to_the_trace(fleet: Fleet, seen: Collector, small_job: Callable[..., Any]) -> None:
    job = next(iter(fleet.client.jobs()))
    answer = httpx.get(fleet.stack.url + job.trace_url.format(step=1), headers=fleet.headers, trust_env=False)
    assert answer.status_code == 307
    assert answer.headers["location"] == UI.format(trace_id=StepIds.of(job.id, 1).trace_hex)
