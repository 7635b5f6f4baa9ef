"""Metrics of fleet, jobs, data plane and Redis that the leading controller shows, by name; and their collector.

`SnapshotCollector` holds the families of the last look. They are replaced as a whole, so the thread that answers
Prometheus never sees half a look. Series of replicas and jobs that are gone vanish with the old families.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Description(NamedTuple):
    """A counter where the name ends with `_total`, else a gauge."""

    text: str
    labels: tuple[str, ...] = ()


DESCRIPTIONS: Final[Mapping[str, Description]] = {
    "flowfleet_fleet_replicas": Description("Rollout replicas by health", ("pool", "health")),
    "flowfleet_fleet_replicas_at_version": Description(
        "Live replicas by how many versions the weights that they serve are behind the published ones: 0, 1, 2, 3+, or "
        "none while they serve none of the job's",
        ("pool", "job", "version_lag"),
    ),
    "flowfleet_fleet_replicas_behind": Description(
        "Live replicas that settled on other weights than the published ones", ("pool", "job")
    ),
    "flowfleet_fleet_outstanding_samples": Description("Samples asked for and not finished", ("pool",)),
    "flowfleet_fleet_busy_seconds_total": Description(
        "Seconds that live replicas had samples to make, summed over them", ("pool",)
    ),
    "flowfleet_fleet_replica_seconds_total": Description(
        "Seconds that replicas were live, summed over them", ("pool",)
    ),
    "flowfleet_job_status": Description("1 for the status of a job that has not ended", ("job", "status")),
    "flowfleet_job_step": Description("Training steps done", ("job",)),
    "flowfleet_job_steps": Description("Training steps that the job has", ("job",)),
    "flowfleet_job_last_progress_timestamp_seconds": Description(
        "When a sample, a score, a step, a publishing, a checkpoint or a validation last came", ("job",)
    ),
    "flowfleet_job_waiting_samples": Description(
        "Samples that may be made now and that no replica was asked for", ("job", "pool")
    ),
    "flowfleet_job_samples_trained_total": Description("Samples trained on", ("job",)),
    "flowfleet_job_samples_dropped_total": Description("Samples dropped by reason", ("job", "reason")),
    "flowfleet_job_accelerator_seconds_total": Description(
        "Seconds times accelerators (on CPUs: processes) that the job held, of the trainer's ranks while it is up and "
        "of the replicas that serve it",
        ("job", "component"),
    ),
    "flowfleet_job_staleness_limit": Description("The job's schedule.max_staleness", ("job",)),
    "flowfleet_job_log_prob_gap_limit": Description("The job's rollout.max_log_prob_gap, where it has one", ("job",)),
    "flowfleet_job_held_steps": Description(
        "Steps whose samples are kept: no kept checkpoint covers them yet", ("job",)
    ),
    "flowfleet_job_oldest_held_step_age_seconds": Description(
        "Seconds since the oldest of those steps was opened, as far as this controller saw", ("job",)
    ),
    "flowfleet_stream_entries": Description(
        "Entries of a job's stream: trajectories (trimmed once an hour) or dead_letters", ("job", "stream")
    ),
    "flowfleet_stream_pending_entries": Description(
        "Entries of the trajectories delivered and not acknowledged", ("job",)
    ),
    "flowfleet_stream_oldest_pending_age_seconds": Description("Age of the oldest of them; 0 without any", ("job",)),
    "flowfleet_redis_up": Description("1 while Redis answers the controller"),
    "flowfleet_redis_memory_bytes": Description("Memory that Redis uses"),
    "flowfleet_redis_memory_limit_bytes": Description("Its maxmemory; the host's memory where none is set"),
    "flowfleet_redis_clients": Description("Connected clients"),
    "flowfleet_redis_commands_total": Description("Commands that Redis processed since its start"),
    "flowfleet_redis_received_bytes_total": Description("Bytes that Redis read from the network"),
    "flowfleet_redis_sent_bytes_total": Description("Bytes that Redis wrote to the network"),
}


class Sample(NamedTuple):
    """Value of one series: metric, labels in the order of its description, value."""

    name: str
    labels: tuple[str, ...]
    value: float


def families(samples: Iterable[Sample]) -> list[Metric]:
    """Groups samples into one family per metric, in the order in which they come."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, labels, value in samples:
        if name not in found:
            found[name] = _family(name)
        found[name].add_metric(labels, value)
    return list(found.values())


def _family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    text, labels = DESCRIPTIONS[name]
    make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return make(name.removesuffix("_total"), text, labels=labels)


class SnapshotCollector(Collector):
    """Shows the last look at each part of what is watched."""

    def __init__(self) -> None:
        self._parts: Mapping[str, list[Metric]] = {}

    def show(self, part: str, samples: Iterable[Sample]) -> None:
        self._parts = {**self._parts, part: families(samples)}

    def clear(self) -> None:
        """Another controller leads."""
        self._parts = {}

    def collect(self) -> Iterator[Metric]:
        for found in self._parts.values():
            yield from found
