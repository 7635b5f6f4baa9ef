"""Which alerts hold now, in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from flowfleet.api.fleet import Fleet, Health, ReplicaView, Shortage
from flowfleet.api.jobs import Progress
from flowfleet.api.overview import JobRow
from services.controller.api.alerts import alerts_of
from services.controller.jobs.queue import placed
from services.controller.store.records import NO_PLACE

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(name: str, status: str = "running", pool: str = "default", **more: Any) -> JobRow:
    facts = {"desired": "running", "algorithm": "flow_grpo", "model": "m", "created_at": NOW}
    return JobRow.model_validate({"id": name, "name": name, "status": status, "pool": pool, **facts, **more})


def replica(**more: Any) -> ReplicaView:
    facts = {"address": "h:1", "pool": "default", "incarnation": "i", "health": Health.SERVING, "version": 3}
    counts = {"outstanding": 0, "samples_total": 0, "device": "cpu"}
    return ReplicaView.model_validate({"replica_id": "r0", "job_id": "a", **facts, **counts, **more})


def fleet(*replicas: ReplicaView, rewards: Any = None, shortages: Any = ()) -> Fleet:
    return Fleet(replicas=list(replicas), rewards=rewards or {}, pools=None, shortages=list(shortages))


ROLLOUT = Progress(phase="rollout", samples_trained=90, samples_dropped={"not_in_a_pair": 500, "stale": 5})


@pytest.mark.parametrize(
    ("rows", "view", "wanted"),
    [
        ([row("a", progress=ROLLOUT)], fleet(replica(lag=1)), []),
        ([row("a", progress=ROLLOUT)], fleet(replica(lag=2)), [("FlowfleetReplicaBehind", "r0 is 2 versions", "a")]),
        ([row("a", progress=ROLLOUT)], fleet(), [("FlowfleetPoolEmpty", "default has a but no live", "a")]),
        ([row("a", progress=ROLLOUT)], fleet(replica(health="lost")), [("FlowfleetPoolEmpty", "no live replica", "a")]),
        ([row("a", progress=Progress(phase="train"))], fleet(), []),
        ([row("a", status="paused", reason="no disk")], fleet(), [("FlowfleetJobStuck", "a waits: no disk", "a")]),
        ([row("a", status="queued")], fleet(), []),
        ([row("a", status="quarantined")], fleet(), [("FlowfleetJobQuarantined", "several times", "a")]),
        (
            [row("a", progress=ROLLOUT.model_copy(update={"samples_dropped": {"stale": 30}}))],
            fleet(replica()),
            [("FlowfleetSamplesDropped", "a has lost 25% of its samples", "a")],
        ),
        ([], fleet(rewards={"ocr": [], "ok": ["h:2"]}), [("FlowfleetRewardDown", "reward ocr has no replica", "")]),
        (
            [],
            fleet(shortages=[Shortage(component="redis", name="primary", reason="full")]),
            [("FlowfleetRedisDown", "redis primary: full", "")],
        ),
    ],
)
def test_alerts(rows: list[JobRow], view: Fleet, wanted: list[tuple[str, str, str]]) -> None:
    found = alerts_of(placed(rows, 0.0), view)
    assert [(one.name, one.job_id) for one in found] == [(name, job_id) for name, _, job_id in wanted]
    for one, (_, text, _) in zip(found, wanted, strict=True):
        assert text in one.text


def test_places_in_the_queue() -> None:
    rows = [row("a"), row("b", "queued"), row("q", "quarantined"), row("c", "queued", pool="big"), row("d", "queued")]
    found = {one.name: (one.place, one.waits) for one in placed(rows, 0.0)}
    assert found["a"] == (None, "")
    assert [found[name] for name in "bcd"] == [(place, "the controller takes it up next") for place in (0, 1, 2)]
    assert found["q"][0] is None


def test_jobs_of_high_priority_pass_those_that_wait_for_less_than_the_weights_say() -> None:
    """Jobs are a minute, four and sixteen old. The ends of those that run say when the next ones start."""
    ages = {"low": 16, "normal": 4, "high": 1}
    rows = [
        row(name, "queued", priority=name, created_at=datetime.fromtimestamp(10_000 - 60 * age - older, UTC))
        for name, age in ages.items()
        for older in [{"low": 0, "normal": 1, "high": 2}[name]]
    ]
    rows += [row(f"r{eta}", progress=ROLLOUT.model_copy(update={"eta_s": eta})) for eta in (30.0, 7.0)]
    found = {one.name: (one.place, one.starts_in_s) for one in placed(rows, 10_000.0)}
    assert found == {
        "high": (0, 7.0),
        "normal": (1, 30.0),
        "low": (2, None),
        "r30.0": (None, None),
        "r7.0": (None, None),
    }


def test_a_job_that_found_no_place_lets_others_of_its_pool_run() -> None:
    reason = f"{NO_PLACE} within 300 s; tried again within 60 s"
    found = {one.name: (one.place, one.waits) for one in placed([row("a", "queued", reason=reason), row("b")], 0.0)}
    assert found == {"a": (None, reason), "b": (None, "")}
