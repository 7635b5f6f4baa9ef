"""What a chaos run found: figures of the job, recovery times by kind, and the weights next to the reference's.

A run has passed when every fault counted, the job succeeded, no sample was lost or doubled, what was dropped is what
was injected, and the weights are those of the reference that was given the same drops.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from tests.faults.ledger import Entry
from tests.faults.schedule import PHASES


class KindFigures(BaseModel):
    """All faults of one kind."""

    model_config = ConfigDict(frozen=True)

    counted: int
    phases: dict[str, int]
    """Phase → faults that struck in it."""
    targets: dict[str, int]
    recovery_median_s: float | None
    recovery_max_s: float | None


class Samples(BaseModel):
    """What became of the job's samples."""

    model_config = ConfigDict(frozen=True)

    asked: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    """Reason → number."""
    doubled: int = 0
    """Trained more often than there are identities."""
    lost: int = 0
    """Neither trained nor dropped."""
    delivered_again: int = 0
    """Came twice from the rollouts; the second one was ignored."""
    drops_injected: tuple[str, ...] = ()
    """step/group/index of the samples whose reward was poisoned."""
    drops_found: tuple[str, ...] = ()

    @property
    def are_exact(self) -> bool:
        return not self.doubled and not self.lost and set(self.drops_found) == set(self.drops_injected)


class Report(BaseModel):
    """The whole run; what `--report` writes."""

    model_config = ConfigDict(frozen=True)

    mode: str
    seed: int
    faults_asked: int
    faults_counted: int = 0
    kinds_skipped: dict[str, str] = {}
    """Kind → why this machine cannot do it."""
    job_status: str = ""
    job_reason: str = ""
    steps: int = 0
    steps_done: int = 0
    seconds: float = 0.0
    reference_seconds: float = 0.0
    samples: Samples = Samples()
    weights: str = ""
    """SHA-256 of the exported weights."""
    reference: str = ""
    """The same of the run without faults that was given the same drops."""
    kinds: dict[str, KindFigures] = {}
    failures: tuple[str, ...] = ()
    interrupted: bool = False
    machine: dict[str, Any] = {}
    faults: list[dict[str, Any]] = []

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Why it has not passed, one sentence each."""
        found = list(self.failures)
        if self.interrupted:
            found.append("the run was interrupted")
        if self.faults_counted < self.faults_asked:
            found.append(f"only {self.faults_counted} of {self.faults_asked} faults counted")
        if self.job_status != "succeeded":
            found.append(f"the job is {self.job_status or 'unknown'}: {self.job_reason or 'no reason given'}")
            return found
        samples = self.samples
        if samples.doubled or samples.lost:
            found.append(f"{samples.doubled} samples are doubled and {samples.lost} are lost")
        if set(samples.drops_found) != set(samples.drops_injected):
            more = sorted(set(samples.drops_found) - set(samples.drops_injected))
            fewer = sorted(set(samples.drops_injected) - set(samples.drops_found))
            found.append(f"drops differ from those injected: {more} were dropped as well, {fewer} were not")
        if not self.weights or self.weights != self.reference:
            found.append(f"the weights {self.weights[:12] or '-'} are not the reference's {self.reference[:12] or '-'}")
        return found


def figures(entries: Sequence[Entry]) -> dict[str, KindFigures]:
    """Figures by kind, ordered by the kinds' names."""
    found = {}
    for kind in sorted({entry.kind for entry in entries}):
        own = [entry for entry in entries if entry.kind == kind and entry.counted]
        times = [entry.recovery_s for entry in own if entry.recovery_s is not None]
        found[kind] = KindFigures(
            counted=len(own),
            phases=dict(Counter(entry.phase for entry in own)),
            targets=dict(Counter(entry.target for entry in own)),
            recovery_median_s=round(statistics.median(times), 2) if times else None,
            recovery_max_s=max(times, default=None),
        )
    return found


HEAD = ("fault", "counted", *PHASES, "other phases", "recovery median (s)", "recovery max (s)")


def rows(kinds: dict[str, KindFigures]) -> list[list[str]]:
    """A table's rows, as text: one a kind."""
    found = []
    for kind, of_kind in kinds.items():
        in_phases = [of_kind.phases.get(phase, 0) for phase in PHASES]
        others = sum(of_kind.phases.values()) - sum(in_phases)
        times = (of_kind.recovery_median_s, of_kind.recovery_max_s)
        shown = ["–" if value is None else f"{value:.1f}" for value in times]
        found.append([kind, *map(str, (of_kind.counted, *in_phases, others)), *shown])
    return found


def as_table(report: Report) -> Table:
    """Formats the report for a terminal."""
    table = Table(title=f"{report.faults_counted} faults, {report.mode}, seed {report.seed}")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "fault" else "right")
    for row in rows(report.kinds):
        table.add_row(*row)
    return table


def summary(report: Report) -> list[str]:
    """The rest of a report as lines of text."""
    samples = report.samples
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(samples.dropped.items())) or "none"
    lines = [
        f"job: {report.job_status or 'unknown'}, {report.steps_done} of {report.steps} steps",
        f"samples: {samples.asked} asked for, {samples.trained} trained, dropped: {dropped}, "
        f"{samples.doubled} doubled, "
        f"{samples.lost} lost, {samples.delivered_again} delivered again and ignored",
        f"drops: {len(samples.drops_injected)} injected, {len(samples.drops_found)} found",
        f"weights: {report.weights or '-'}; reference with the same drops: {report.reference or '-'}",
        f"time: {report.seconds:.0f} s with faults, {report.reference_seconds:.0f} s without",
        *(f"skipped: {kind}: {why}" for kind, why in report.kinds_skipped.items()),
    ]
    return [*lines, *(f"FAILED: {problem}" for problem in report.problems)] + (["passed"] if report.passed else [])


def as_markdown(reports: Sequence[Report]) -> str:
    """Reports side by side, for the documentation: figures of the jobs, then faults by kind."""
    columns = [f"{report.mode}, seed {report.seed}" for report in reports]
    facts: dict[str, list[str]] = {}
    for report in reports:
        samples = report.samples
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(samples.dropped.items())) or "0"
        for name, value in {
            "faults counted": f"{report.faults_counted}",
            "steps": f"{report.steps_done}",
            "samples trained": f"{samples.trained}",
            "samples dropped, by reason": dropped,
            "drops injected": f"{len(samples.drops_injected)}",
            "samples doubled": f"{samples.doubled}",
            "samples lost": f"{samples.lost}",
            "weights (SHA-256)": f"`{report.weights[:16]}…`" if report.weights else "–",
            "reference (SHA-256)": f"`{report.reference[:16]}…`" if report.reference else "–",
            "seconds with faults": f"{report.seconds:.0f}",
            "seconds without": f"{report.reference_seconds:.0f}",
            "outcome": "passed" if report.passed else "; ".join(report.problems),
        }.items():
            facts.setdefault(name, []).append(value)
    parts = [_markdown(["", *columns], [[name, *values] for name, values in facts.items()])]
    for report, column in zip(reports, columns, strict=True):
        parts.append(f"Faults by kind, {column}:\n\n{_markdown(HEAD, rows(report.kinds))}")
    return "\n\n".join(parts) + "\n"


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---" if place == 0 else "---:" for place in range(len(head))], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
