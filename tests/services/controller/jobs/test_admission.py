"""Which jobs get places, in which order, and how long a small one may go ahead of a large one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowfleet.api.jobs import SweepPart
from flowfleet.job.spec import parse_job
from services.controller.jobs.admission import BACKFILL_S, Admission
from services.controller.limits import Limits, open_samples
from services.controller.platforms.local.launcher import LocalLauncher
from services.controller.store.records import JobRecord

NOW = 1_000_000.0


def job(name: str, ranks: int = 1, age_s: float = 0.0, priority: str = "normal") -> JobRecord:
    spec = parse_job(
        {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}, "trainer": {"world_size": ranks}}
    )
    created = datetime.fromtimestamp(NOW - age_s, UTC)
    fields: dict[str, Any] = {"status": "queued", "desired": "running", "created_at": created, "priority": priority}
    return JobRecord(id=name, name=name, spec=spec.model_dump(mode="json"), **fields)


async def admitted(admission: Admission, jobs: list[JobRecord]) -> dict[str, str]:
    """Why each of the jobs waits that got no place."""
    return await admission.admit(jobs, jobs, NOW)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_places_go_by_priority_and_age(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, places=2)
    jobs = [job("low", age_s=100, priority="low"), job("old", age_s=50), job("new", age_s=2, priority="high")]
    why = await admitted(Admission(launcher, Limits()), jobs)
    assert set(launcher.admitted) == {"old", "low"}  # 4 × 50, 1 × 100, 16 × 2
    assert why == {"new": "1 of the 2 places of trainers on this machine"}
    await launcher.leave("old")
    assert await admitted(Admission(launcher, Limits()), [jobs[2]]) == {}


async def test_small_jobs_go_ahead_of_a_large_one_for_a_while(tmp_path: Path) -> None:
    launcher, seconds = LocalLauncher(tmp_path, places=4), Seconds()
    admission = Admission(launcher, Limits(), seconds)
    await launcher.admit("first", job("first", 2).job_spec())
    large = job("large", 4, age_s=900)
    assert set(await admitted(admission, [large, job("small", 1, age_s=10)])) == {"large"}
    assert set(launcher.admitted) == {"first", "small"}
    seconds.now = BACKFILL_S + 1
    why = await admitted(admission, [large, job("later", 1, age_s=5)])
    assert why["later"] == "job large, which needs more places and comes before it"
    await launcher.leave("first")
    await launcher.leave("small")
    assert set(await admitted(admission, [large, job("later", 1, age_s=5)])) == {"later"}
    assert set(launcher.admitted) == {"large"}


async def test_the_wait_of_a_large_job_that_got_its_places_is_forgotten(tmp_path: Path) -> None:
    launcher, seconds = LocalLauncher(tmp_path, places=2), Seconds()
    admission = Admission(launcher, Limits(), seconds)
    await launcher.admit("first", job("first").job_spec())
    assert "large" in await admitted(admission, [job("large", 2, age_s=9)])
    await launcher.leave("first")
    assert await admitted(admission, [job("large", 2, age_s=9)]) == {}
    await launcher.leave("large")
    await launcher.admit("first", job("first").job_spec())
    seconds.now = BACKFILL_S + 1
    assert set(
        await admission.admit(
            [job("large", 2, age_s=9), job("small", age_s=1)], [job("large", 2, age_s=9), job("small", age_s=1)], NOW
        )
    ) == {"large"}


async def test_a_sweep_has_as_many_places_as_it_asks_for(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, places=4)
    part = SweepPart(name="s", at_once=1)
    swept = [job(name, age_s=age_s).model_copy(update={"sweep": part}) for name, age_s in (("a", 9.0), ("b", 8.0))]
    assert await admitted(Admission(launcher, Limits()), [*swept, job("c")]) == {"b": "others of its sweep"}
    assert set(launcher.admitted) == {"a", "c"}


async def test_jobs_side_by_side_stay_within_the_limits(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, places=4)
    limits = Limits(open_samples=open_samples(job("a").job_spec()) + 1)
    why = await admitted(Admission(launcher, limits), [job("a", age_s=9.0), job("b")])
    assert set(launcher.admitted) == {"a"}
    assert why["b"].startswith("running jobs: the fleet's jobs would have ")
    await launcher.leave("a")
    assert await admitted(Admission(launcher, limits), [job("b")]) == {}
