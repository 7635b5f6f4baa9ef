"""The scale rehearsal: its figures from notes, and a whole one, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scale.figures import latencies, percentiles, starts
from bench.scale.load import Load
from tests.bench.running import run_bench


def test_percentiles_are_values_that_were_there() -> None:
    assert percentiles(range(101)) == {"n": 101, "p50": 50_000, "p99": 99_000, "max": 100_000}
    assert percentiles([]) == {"n": 0}


def test_latencies_are_between_what_the_services_noted() -> None:
    step = [
        ("published", "job", 0, 100.0),
        ("generate", "job", 0, 100.1),
        ("generate", "job", 0, 100.3),
        ("generated", "job", 0, 110.0),
        ("generated", "job", 0, 111.0),
        ("train", "job", 0, 111.5),
        ("published", "job", 1, 114.0),
    ]
    found = latencies(step, 99.0, 113.0)
    assert found["scheduling"] == pytest.approx({"n": 2, "p50": 100, "p99": 300, "max": 300})
    assert [found[name]["p50"] for name in ("turnaround", "step")] == pytest.approx([500, 14_000])
    assert latencies(step, 120.0, 130.0)["step"] == {"n": 0}
    assert starts(step, {"job": 99.0})["p50"] == pytest.approx(1100)


def test_every_replica_has_an_address_and_a_pool_with_one_job() -> None:
    load = Load(replicas=10_000, jobs=100)
    addresses = {load.replica_address(index) for index in range(load.replicas)}
    assert len(addresses) == load.replicas
    assert {load.pool_of(index) for index in range(load.replicas)} == {load.job(k, Path())["name"] for k in range(100)}


def test_a_small_rehearsal_makes_steps(tmp_path: Path) -> None:
    sizes = "--replicas 4 --jobs 2 --processes 1 --prompts 2 --group-size 2 --net 80"
    times = "--seconds 3 --generate-s 0.3 --train-s 0.1 --publish-s 0.05"
    printed, (result,) = run_bench("scale", f"{sizes} {times}", tmp_path)
    latency = {row["what"]: row for row in result["latency_ms"]}
    assert result["jobs_at_work"] == 2
    assert latency["scheduling"]["n"] > 0
    assert latency["event loop lag"]["n"] > 0
    assert result["samples_per_s"] > 0
    assert result["status_calls_per_s"] == 0
    assert {"controller", "redis", "trainers", "replicas-0"} <= {row["process"] for row in result["processes"]}
    assert "| scheduling" in printed
