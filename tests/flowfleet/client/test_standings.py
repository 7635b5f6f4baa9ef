"""How the jobs of a sweep stand: means, intervals and ranks, and the jobs that fall behind."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.api.jobs import Desired, JobStatus, Progress, SweepPart
from flowfleet.api.overview import JobRow
from flowfleet.client.standings import fallen_behind, interval, standings, student_t


def row(job_id: str, settings: dict[str, Any], status: str = "running", **progress: float) -> JobRow:
    return JobRow(
        id=job_id,
        name="signs",
        status=JobStatus(status),
        desired=Desired.RUNNING,
        pool="default",
        algorithm="flow_grpo",
        model="tiny",
        created_at=datetime.now(UTC),
        progress=Progress.model_validate(progress),
        sweep=SweepPart(name="lr", settings=settings),
    )


def probability_within(t: float, degrees: int) -> float:
    """Integrates Student's density from -t to t."""
    x = np.linspace(-t, t, 200_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(x**2 / degrees))
    return float(np.trapezoid(density, x))


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 11, 12, 30, 200])
def test_students_t_holds_95_percent(degrees: int) -> None:
    assert probability_within(student_t(degrees), degrees) == pytest.approx(0.95, abs=2e-4)


def test_an_interval_is_that_of_known_values() -> None:
    assert interval([None, None]) is None
    assert interval([None, 0.5]) == (0.5, None)
    values = [0.1, 0.4, 0.2]
    mean, half = interval([*values, None]) or (0, 0)
    assert mean == pytest.approx(sum(values) / 3)
    assert half == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3))


def test_jobs_are_grouped_by_all_settings_but_the_seed_and_sorted_by_their_best() -> None:
    jobs = [
        row("a", {"lr": 1e-5, "seed": 0}, held_out_best=0.5, held_out_reward=0.4, reward=9.0),
        row("b", {"lr": 1e-5, "seed": 1}, "succeeded", held_out_best=0.7),
        row("c", {"lr": [1, 2], "seed": 0}, held_out_best=0.9, reward=1.0),
        row("d", {"lr": 0.5}, "queued", reward=3.0),
        row("e", {"lr": 0.1}, "queued"),
    ]
    found = standings(jobs)
    assert [one["settings"] for one in found] == [{"lr": [1, 2]}, {"lr": 1e-5}, {"lr": 0.5}, {"lr": 0.1}]
    assert found[1]["jobs"] == ["b", "a"]
    assert found[1]["statuses"] == {"running": 1, "succeeded": 1}
    assert found[1]["held_out_best"] == pytest.approx((0.6, 12.706 * statistics.stdev([0.5, 0.7]) / math.sqrt(2)))
    assert (found[1]["held_out_reward"], found[1]["reward"]) == ((0.4, None), (9.0, None))
    assert standings([]) == []


def test_jobs_fall_behind_at_their_own_newest_step() -> None:
    curves: dict[str, dict[int, float | None]] = {
        "best": {10: 0.5, 20: 0.8, 30: 0.9},
        "slow": {10: 0.4, 20: 0.75},
        "bad": {10: 0.4, 20: 0.7, 21: None},
        "ahead": {40: 0.1},
        "new": {},
    }
    assert fallen_behind(curves, 0.09) == {"bad": (20, 0.7, 0.8)}


@given(
    st.dictionaries(st.text("abc", min_size=1), st.dictionaries(st.integers(0, 5), st.integers(-9, 9).map(float))),
    st.integers(1, 9),
)
def test_none_falls_behind_itself_and_the_best_never_does(curves: dict[str, dict[int, float]], by: int) -> None:
    behind = fallen_behind(curves, by)
    for job, (step, value, best) in behind.items():
        assert (step, value) == (max(curves[job]), curves[job][max(curves[job])])
        assert best - value >= by
        assert any(curve.get(step) == best for curve in curves.values())
    if known := [(max(curve), curve[max(curve)], job) for job, curve in curves.items() if curve]:
        assert max(known)[2] not in behind
