"""Prometheus metrics of a replica."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from flowfleet.process.telemetry import metric_name


class RolloutMetrics:
    """Counters by job, so that rates give images a second and the share of each part."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._samples = Counter(metric_name("rollout/samples"), "Samples published.", ["job"], registry=registry)
        self._dropped = Counter(
            metric_name("rollout/samples_dropped"), "Samples given up or failed.", ["job"], registry=registry
        )
        self._seconds = Counter(
            metric_name("rollout/seconds"),
            "Seconds by part: encode, denoise, decode, publish.",
            ["job", "part"],
            registry=registry,
        )
        self._prompts = Counter(
            metric_name("rollout/prompts"),
            "Prompts by where their embeddings came from: cache, encoder.",
            ["job", "source"],
            registry=registry,
        )
        self._memory = Gauge(
            metric_name("rollout/peak_memory_gib"), "Most memory of the accelerator held so far.", registry=registry
        )
        self._in_flight = Gauge(
            metric_name("rollout/in_flight"), "Samples admitted and not finished.", registry=registry
        )
        self._version = Gauge(
            metric_name("rollout/policy_version"), "Version served, -1 while none is.", registry=registry
        )
        self.version(None)

    def peak_memory(self, size_bytes: int) -> None:
        self._memory.set(size_bytes / 2**30)

    def published(self, job_id: str, num_samples: int, seconds: Mapping[str, float]) -> None:
        self._samples.labels(job=job_id).inc(num_samples)
        for part, value in seconds.items():
            self._seconds.labels(job=job_id, part=part).inc(value)

    def encoded(self, job_id: str, prompts: Mapping[str, int]) -> None:
        for source, number in prompts.items():
            self._prompts.labels(job=job_id, source=source).inc(number)

    def dropped(self, job_id: str, num_samples: int) -> None:
        self._dropped.labels(job=job_id).inc(num_samples)

    def in_flight(self, num_samples: int) -> None:
        self._in_flight.set(num_samples)

    def version(self, version: int | None) -> None:
        self._version.set(-1 if version is None else version)
