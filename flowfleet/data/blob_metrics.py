"""Prometheus metrics of the blobs that a process reads and writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Operation = Literal["get", "put"]


class BlobMetrics:
    """Metrics of a registry. Several stores of a process share them; see `of`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["operation"]
        self._bytes = Counter("flowfleet_blob_bytes", "Bytes of blobs read and written", labels, registry=registry)
        self._operations = Counter(
            "flowfleet_blob_operations",
            "Blobs read and written, by how it ended: ok, or error (gone, broken, store away)",
            [*labels, "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "flowfleet_blob_operation_seconds",
            "Seconds to read or write a blob, hashing included",
            labels,
            buckets=SECONDS,
            registry=registry,
        )
        for operation in ("get", "put"):  # rates of what has not happened yet are 0, not absent
            self._bytes.labels(operation=operation)
            self._operations.labels(operation=operation, result="ok")

    @classmethod
    def of(cls, registry: CollectorRegistry = REGISTRY) -> BlobMetrics:
        """The registry's own, made when first asked for."""
        if registry not in _METRICS:
            _METRICS[registry] = cls(registry)
        return _METRICS[registry]

    @contextmanager
    def time(self, operation: Operation, size_bytes: int) -> Iterator[None]:
        """Counts one operation of so many bytes and its seconds, or its failure."""
        start, result = time.perf_counter(), "error"
        try:
            yield
            result = "ok"
            self._bytes.labels(operation=operation).inc(size_bytes)
        finally:
            self._operations.labels(operation=operation, result=result).inc()
            self._seconds.labels(operation=operation).observe(time.perf_counter() - start)


_METRICS: Final[WeakKeyDictionary[CollectorRegistry, BlobMetrics]] = WeakKeyDictionary()
