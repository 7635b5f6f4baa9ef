"""Alerts in words, from what the REST API knows by itself, without Prometheus. Pure.

Names are those of the release's alerts (deploy/helm/flowfleet/files/alerts.yaml), whose runbook they share. Prometheus
waits before it fires; this list shows the present state.
"""

from collections.abc import Iterable, Iterator

from flowfleet.api.fleet import Fleet, Health
from flowfleet.api.jobs import JobStatus
from flowfleet.api.overview import Alert, JobRow

LIVE = (Health.IDLE, Health.SERVING, Health.UPDATING)
DROPPED = 0.1
"""Share of a job's samples."""
_SHORT = {"redis": "FlowfleetRedisDown", "retention": "FlowfleetRetentionHeld"}
EXPECTED = ("not_in_a_pair", "not_best_or_worst", "not_selected")
"""Reasons of samples that a job leaves out by its settings."""


def alerts_of(rows: Iterable[JobRow], fleet: Fleet) -> list[Alert]:
    """`rows`: jobs that have not ended."""
    return [*_of_fleet(fleet), *(alert for row in rows for alert in _of_job(row, fleet))]


def _of_fleet(fleet: Fleet) -> Iterator[Alert]:
    for short in fleet.shortages:
        name = _SHORT.get(short.component, "FlowfleetNoCapacity")
        yield Alert(name=name, text=f"{short.component} {short.name}: {short.reason}")
    for name, addresses in fleet.rewards.items():
        if not addresses:
            yield Alert(name="FlowfleetRewardDown", text=f"reward {name} has no replica: jobs that use it wait")
    for replica in fleet.replicas:
        if (replica.lag or 0) > 1:
            text = f"replica {replica.replica_id} is {replica.lag} versions behind its job"
            yield Alert(name="FlowfleetReplicaBehind", text=text, job_id=replica.job_id)


def _of_job(row: JobRow, fleet: Fleet) -> Iterator[Alert]:
    progress = row.progress
    if row.status is JobStatus.QUARANTINED:
        yield Alert(name="FlowfleetJobQuarantined", text=f"{row.name}: {row.waits}", job_id=row.id)
    elif row.status in (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.PAUSED) and row.waits:
        yield Alert(name="FlowfleetJobStuck", text=f"{row.name} waits: {row.waits}", job_id=row.id)
    dropped = sum(number for reason, number in progress.samples_dropped.items() if reason not in EXPECTED)
    share = dropped / max(1, dropped + progress.samples_trained)
    if share > DROPPED:
        text = f"{row.name} has lost {share:.0%} of its samples; samples_dropped has the reasons"
        yield Alert(name="FlowfleetSamplesDropped", text=text, job_id=row.id)
    live = any(replica.pool == row.pool and replica.health in LIVE for replica in fleet.replicas)
    if row.status in (JobStatus.STARTING, JobStatus.RUNNING) and not live and progress.phase in ("starting", "rollout"):
        yield Alert(
            name="FlowfleetPoolEmpty", text=f"pool {row.pool} has {row.name} but no live replica", job_id=row.id
        )
