"""How the rewards answer, as the controller sees them: with the network and the wait in between."""

import asyncio
import time
from collections import Counter as Counted
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from flowfleet.api.fleet import RewardLoad
from flowfleet.errors import grpc_code

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


RECENT_S = 300.0
MAX_RECENT = 512


def _load_of(in_flight: int, calls: Sequence[tuple[float, bool]]) -> RewardLoad:
    """`calls`: seconds and success of each."""
    ordered = sorted(seconds for seconds, _ in calls)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)] if ordered else []
    p50, p99 = at or (None, None)
    failures = sum(not ok for _, ok in calls)
    return RewardLoad(in_flight=in_flight, calls=len(calls), failures=failures, latency_p50_s=p50, latency_p99_s=p99)


class RewardCalls:
    """Counters of a registry, made once; every job's calls go there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "flowfleet_reward_calls",
            "Score calls of the controller by gRPC code",
            ["reward", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "flowfleet_reward_call_seconds",
            "Seconds from call to answer, as the controller sees them",
            ["reward"],
            buckets=SECONDS,
            registry=registry,
        )

        self._recent: dict[str, deque[tuple[float, float, bool]]] = defaultdict(lambda: deque(maxlen=MAX_RECENT))
        """Reward → end, seconds and success of its last calls."""
        self._in_flight: Counted[str] = Counted()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flowfleet_controller_reward_{name}", text, labels, registry=registry)

        self._failures = counter("failures", "Times that a reward failed for some samples and was waited for", "reward")
        self._given_up = counter(
            "given_up_samples",
            "Samples whose reward failed for longer than timeouts.rewards_s, by what followed: pause, drop or skip",
            "reward",
            "policy",
        )
        self._rejected = counter(
            "rejected_samples",
            "Samples without a score, by fault: error, missing, duplicated, empty, not_finite or out_of_range",
            "reward",
            "fault",
        )
        self._gated = counter(
            "gated_samples", "Samples on which a reward's gate acted: zero or mask", "reward", "action"
        )

    def failed(self, reward: str) -> None:
        """Calls that failed for the job; `rejected` counts for the service."""
        self._failures.labels(reward=reward).inc()

    def gave_up(self, reward: str, policy: str, num_samples: int) -> None:
        self._given_up.labels(reward=reward, policy=policy).inc(num_samples)

    def rejected(self, service: str, fault: str) -> None:
        self._rejected.labels(reward=service, fault=fault).inc()

    def gated(self, reward: str, action: str) -> None:
        self._gated.labels(reward=reward, action=action).inc()

    def load(self) -> dict[str, RewardLoad]:
        """Reward → its calls of the last minutes."""
        since = time.perf_counter() - RECENT_S
        found = {}
        for reward in sorted({*self._recent, *self._in_flight}):
            calls = [(seconds, ok) for end, seconds, ok in self._recent.get(reward, ()) if end >= since]
            if calls or self._in_flight[reward]:
                found[reward] = _load_of(self._in_flight[reward], calls)
        return found

    def _note(self, reward: str, start: float, code: str) -> None:
        """Remembers a call; one that its caller cancelled says nothing of the reward."""
        if code != "CANCELLED":
            now = time.perf_counter()
            self._recent[reward].append((now, now - start, code == "OK"))

    @contextmanager
    def call(self, reward: str) -> Iterator[None]:
        """Counts one Score call, and its seconds, under the code that it ends with."""
        start, code = time.perf_counter(), "OK"
        self._in_flight[reward] += 1
        try:
            yield
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise
        except Exception as error:
            code = grpc_code(error).name
            raise
        finally:
            self._in_flight[reward] -= 1
            self._note(reward, start, code)
            self._calls.labels(reward=reward, code=code).inc()
            self._seconds.labels(reward=reward).observe(time.perf_counter() - start)
