"""Metrics of the reward service, labeled by scorer."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from flowfleet.errors import grpc_code
from services.reward.scorer import GradientOutcome, Outcome, Problem, Score, ScoreGradient

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RewardMetrics:
    """Counters and histograms of one scorer, made once a registry."""

    def __init__(self, scorer: str, score_range: tuple[float, float], registry: CollectorRegistry = REGISTRY) -> None:
        def observed(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"flowfleet_reward_{name}", text, ["scorer"], buckets=buckets, registry=registry)
            return made.labels(scorer=scorer)

        def counted(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flowfleet_reward_{name}", text, ["scorer", *labels], registry=registry)

        self._scorer = scorer
        self._requests = counted("requests", "Score calls by the code they ended with", "code")
        self._errors = counted("errors", "Samples without a score by reason", "reason")
        self._samples = counted("samples", "Samples handled").labels(scorer=scorer)
        self._latency = observed("request_seconds", "Seconds from call to answer, waiting included", SECONDS)
        self._batch_seconds = observed("batch_seconds", "Seconds to decode and score a batch", SECONDS)
        self._batch_size = observed("batch_size", "Samples in a batch", BATCH_SIZES)
        self._scores = observed("score", "Scores given", score_buckets(score_range))
        self._processes = Gauge(
            "flowfleet_reward_processes", "Processes that score, 0 for the service's own", ["scorer"], registry=registry
        )
        self._busy = counted("busy_seconds", "Seconds that the pool's processes worked, summed over them")
        self._deaths = counted("process_deaths", "Processes of the pool that died")
        self.set_processes(0)
        self._in_flight = Gauge(
            "flowfleet_reward_in_flight_samples", "Samples that are being scored", ["scorer"], registry=registry
        )
        self._in_flight.labels(scorer=scorer).set(0)
        self._queued = Gauge("flowfleet_reward_queued_samples", "Samples that wait", ["scorer"], registry=registry)

    @contextmanager
    def in_flight(self, num_samples: int) -> Iterator[None]:
        """Counts samples while they are being scored."""
        gauge = self._in_flight.labels(scorer=self._scorer)
        gauge.inc(num_samples)
        try:
            yield
        finally:
            gauge.dec(num_samples)

    def watch_queue(self, num_queued: Callable[[], int]) -> None:
        """Where the length of the queue is read from."""
        self._queued.labels(scorer=self._scorer).set_function(num_queued)

    def set_processes(self, number: int) -> None:
        self._processes.labels(scorer=self._scorer).set(number)

    def observe_busy(self, seconds: float) -> None:
        """Observes busy time of one process. The sum's rate, divided by the number of processes, is utilization."""
        self._busy.labels(scorer=self._scorer).inc(seconds)

    def observe_death(self) -> None:
        self._deaths.labels(scorer=self._scorer).inc()

    def observe_batch(self, outcomes: Sequence[Outcome | GradientOutcome], seconds: float) -> None:
        self._samples.inc(len(outcomes))
        self._batch_size.observe(len(outcomes))
        self._batch_seconds.observe(seconds)
        for outcome in outcomes:
            if isinstance(outcome, Problem):
                self._errors.labels(scorer=self._scorer, reason=outcome.reason).inc()
            elif isinstance(outcome, Score | ScoreGradient):
                self._scores.observe(outcome.value)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one Score call, and its seconds, under the code that it ends with."""
        start, code = time.perf_counter(), "OK"
        try:
            yield
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:
            code = grpc_code(error).name
            raise
        finally:
            self._requests.labels(scorer=self._scorer, code=code).inc()
            self._latency.observe(time.perf_counter() - start)


def score_buckets(score_range: tuple[float, float]) -> list[float]:
    """Ten equal steps of a bounded range; of an unbounded one, powers of two from 1 to 4096 on the sides that exist."""
    low, high = score_range
    if math.isfinite(low) and math.isfinite(high):
        return [low + (high - low) * step / 10 for step in range(11)]
    powers = [2.0**exponent for exponent in range(13)]
    return [bound for bound in sorted([*(-power for power in powers), 0.0, *powers]) if low <= bound <= high]
