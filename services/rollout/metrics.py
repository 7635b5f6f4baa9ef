"""Prometheus metrics of a replica."""

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from flowfleet.process.telemetry import metric_name


class RolloutMetrics:
    """Counters by job, so that rates give images a second and the share of each part."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counted(name: str, text: str, *labels: str) -> Counter:
            return Counter(metric_name(f"rollout/{name}"), text, ["job", *labels], registry=registry)

        def shown(name: str, text: str) -> Gauge:
            return Gauge(metric_name(f"rollout/{name}"), text, registry=registry)

        self._samples = counted("samples", "Samples published.")
        self._dropped = counted("samples_dropped", "Samples given up or failed.")
        self._seconds = counted("seconds", "Seconds by part: encode, denoise, decode, publish.", "part")
        self._prompts = counted("prompts", "Prompts by where their embeddings came from: cache, encoder.", "source")
        self._memory = shown("peak_memory_gib", "Most memory of the accelerator held so far.")
        self._idle = shown("idle_seconds", "Seconds without work of any job.")
        self._in_flight = shown("in_flight", "Samples admitted and not finished.")
        self._version = shown("policy_version", "Version served, -1 while none is.")
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

    def idle(self, seconds: float) -> None:
        self._idle.set(seconds)

    def in_flight(self, num_samples: int) -> None:
        self._in_flight.set(num_samples)

    def version(self, version: int | None) -> None:
        self._version.set(-1 if version is None else version)
