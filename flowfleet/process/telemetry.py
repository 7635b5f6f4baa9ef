"""Logs as JSON lines, metrics for Prometheus, and timings of phases. Free of torch.

Metric names are the field's own (`actor/ppo_kl`), turned into Prometheus style (`flowfleet_actor_ppo_kl`), with the job
as a label. Each service that has a registry makes one `JobMetrics` and hands it around: there is no global of ours.
"""

import datetime
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, start_http_server

from flowfleet.errors import Unavailable

LOG_PROB_GAP: Final = "rollout_corr/log_ratio_abs_mean"
"""Metric of a step: mean |trainer's - rollout's log-prob|. `rollout.max_log_prob_gap` limits it."""
LOG_PROB_NOT_FINITE: Final = "rollout_corr/not_finite"
"""Metric of a step: share of rows whose gap is no finite number, left out of that mean. 0 in a healthy job."""

_CONTEXT: Final = ("job", "step", "sample")
_LABELED: Final = re.compile(
    r"(?P<prefix>[^/]+)(?:/sources/(?P<source>[^/]+))?(?:/rewards/(?P<reward>[^/]+))?/(?P<what>[^/]+)"
)
_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]+")


class JsonFormatter(logging.Formatter):
    """JSON lines of a log: ts, level, service, logger, msg, and job, step, sample, error where given."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in _CONTEXT if record.__dict__.get(name) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(service: str, level: str = "info") -> None:
    """Sends all logs of the process to stderr as JSON lines, e.g. `log.info("…", extra={"job": job_id, "step": 3})`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def start_metrics_server(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> int:
    """Serves `/metrics` from a thread; port 0 takes a free one. Returns the port. Unavailable when it is taken."""
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: choose another --metrics-port ({error})") from None
    return int(server.server_port)


def metric_name(name: str) -> str:
    """ "actor/ppo_kl" → "flowfleet_actor_ppo_kl"; every run of other characters becomes one underscore. What is of one
    reward or source has it as a label: critic/rewards/NAME/mean → "flowfleet_critic_reward_score_mean"."""
    if labels := _labels(name):
        parts = name.split("/")
        name = "/".join([parts[0], *({"source": "source", "reward": "reward_score"}[tag] for tag in labels), parts[-1]])
    return "flowfleet_" + _INVALID.sub("_", name).strip("_")


def _labels(name: str) -> dict[str, str]:
    """The source and the reward that a metric is of."""
    match = _LABELED.fullmatch(name)
    return {key: match[key] for key in ("source", "reward") if match[key] is not None} if match else {}


class JobMetrics:
    """Gauges labeled by job, and by source of prompts and reward where they are of one, created when a name is first
    observed."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._series: dict[str, set[tuple[str, ...]]] = {}
        """Series of each gauge, by the values of its labels."""
        self._lock = threading.Lock()

    def observe(self, job_id: str, metrics: Mapping[str, float]) -> None:
        """Sets the job's latest value of each metric, e.g. `{"actor/loss": 0.1, "timing_s/gen": 2.5}`."""
        with self._lock:
            for name, value in metrics.items():
                labels = {"job": job_id, **_labels(name)}
                self._gauge(metric_name(name), name, labels).labels(**labels).set(value)

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Removes the series of all other jobs."""
        with self._lock:
            for key, series in list(self._series.items()):
                for labels in [item for item in series if item[0] not in job_ids]:
                    self._gauges[key].remove(*labels)
                    series.remove(labels)
                if not series:
                    self._registry.unregister(self._gauges.pop(key))
                    del self._series[key]

    def _gauge(self, key: str, name: str, labels: Mapping[str, str]) -> Gauge:
        if key not in self._gauges:
            text = name if len(labels) == 1 else "Raw scores of one reward" if "reward" in labels else "Of one source"
            self._gauges[key] = Gauge(key, text, [*labels], registry=self._registry)
        self._series.setdefault(key, set()).add(tuple(labels.values()))
        return self._gauges[key]


class Timings:
    """Seconds spent by name, summed: `with timings("gen"): …`, then `timings.metrics()`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds what was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """`{"timing_s/gen": 2.5, …}`."""
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
