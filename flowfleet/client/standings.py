"""How the jobs of a sweep stand: settings against rewards, with intervals over seeds; which fall behind. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf, sqrt
from typing import Any, Final

from flowfleet.api.jobs import Job
from flowfleet.api.overview import JobRow
from flowfleet.job.sweeps import label

FIGURES: Final = ("held_out_best", "held_out_reward", "reward")
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def settings_of(job: Job | JobRow) -> dict[str, Any]:
    return job.sweep.settings if job.sweep else {}


def standings(jobs: Iterable[JobRow]) -> list[dict[str, Any]]:
    """A row for jobs that differ in their seeds alone, the best first: `settings`, `jobs` (ids, the best first),
    `statuses`, and an interval or None of each of FIGURES."""
    groups: dict[str, tuple[dict[str, Any], list[JobRow]]] = {}
    for job in sorted(jobs, key=lambda job: _rank(getattr(job.progress, figure) for figure in FIGURES)):
        own = {key: value for key, value in settings_of(job).items() if key != "seed"}
        groups.setdefault(label(own), (own, []))[1].append(job)
    rows = [
        {"settings": own, "jobs": [job.id for job in group], "statuses": Counter(job.status for job in group)}
        | {figure: interval(getattr(job.progress, figure) for job in group) for figure in FIGURES}
        for own, group in groups.values()
    ]
    return sorted(rows, key=lambda row: _rank(row[figure] and row[figure][0] for figure in FIGURES))


def interval(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Mean of the values that are known, and half of its 95 % interval by Student's t, which one value has not."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return (known[0], None) if known else None
    return statistics.fmean(known), student_t(len(known) - 1) * statistics.stdev(known) / sqrt(len(known))


def student_t(degrees: int) -> float:
    """Student's t of two-sided 95 %, beyond the table by its expansion in 1 / degrees (Abramowitz, Stegun: 26.7.5)."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.95996 + 2.3723 / degrees + 2.8225 / degrees**2


def fallen_behind(curves: Mapping[str, Mapping[int, float | None]], by: float) -> dict[str, tuple[int, float, float]]:
    """Jobs whose newest value is worse by `by` than the best of all jobs at the same step: (step, value, best).
    `curves`: job → step → reward."""
    known = {job: {at: value for at, value in curve.items() if value is not None} for job, curve in curves.items()}
    newest = {job: max(curve) for job, curve in known.items() if curve}
    best = {step: max(one[step] for one in known.values() if step in one) for step in newest.values()}
    found = {job: (step, known[job][step], best[step]) for job, step in newest.items()}
    return {job: row for job, row in found.items() if row[2] - row[1] >= by}


def _rank(rewards: Iterable[float | None]) -> list[float]:
    return [inf if reward is None else -reward for reward in rewards]
