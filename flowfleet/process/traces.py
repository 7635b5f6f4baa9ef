"""OpenTelemetry traces of a process: one trace a training step, a span a call. Off unless OTLP has an endpoint.

    traces.start("rollout")            once a process; imports OpenTelemetry where traces are on, else does nothing
    traces.tracer()                    what makes spans (spans.py); None while traces are off
    traces.stop()                      sends what is left

The variables are OpenTelemetry's own (docs/operations.md). A step's trace and its first span have ids that derive from
job and step. So whoever drives the step adds to the same trace, after a restart too, and a page can link to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from flowfleet.extras import pip_install
from flowfleet.proto.common_pb2 import Sample

if TYPE_CHECKING:
    from flowfleet.process.spans import Tracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_tracer: Tracer | None = None

log = logging.getLogger(__name__)


class StepIds(NamedTuple):
    """Ids of a step's trace and of its first span."""

    trace: int
    span: int

    @classmethod
    def of(cls, job_id: str, step: int) -> StepIds:
        digest = hashlib.sha256(f"{job_id}/{step}".encode()).digest()
        return cls(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big"))

    @property
    def trace_hex(self) -> str:
        """The trace's id as tools show it."""
        return f"{self.trace:032x}"


def is_on(env: Mapping[str, str] = os.environ) -> bool:
    """Returns True if the environment asks for traces by OTLP."""
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    return not disabled and exporter == "otlp" and any(env.get(name, "").strip() for name in ENDPOINTS)


def start(service: str) -> None:
    """Traces this process as `flowfleet-<service>` where the environment asks for it. A service runs without traces
    where they cannot work, and logs why."""
    global _tracer
    if not is_on():
        return
    try:
        from flowfleet.process.spans import Tracer

        _tracer = Tracer(service, _protocol(os.environ))
    except ImportError as error:
        log.warning("traces are off: %s; %s, or unset %s", error, pip_install("traces"), ENDPOINTS[1])
    except ValueError as error:
        log.warning("traces are off: %s", error)


def stop() -> None:
    """Sends the spans that are left, for a few seconds at most."""
    global _tracer
    if _tracer is not None:
        _tracer.close()
        _tracer = None


def tracer() -> Tracer | None:
    """Returns the tracer that makes this process's spans; None while traces are off."""
    return _tracer


def traceparent() -> str:
    """W3C context of the call that is being served, for an entry of a stream; empty while it is not traced."""
    return "" if _tracer is None else _tracer.traceparent()


def link(samples: Iterable[Sample]) -> None:
    """Links the current span to the calls that made these samples."""
    if _tracer is not None:
        _tracer.link(samples)


def _protocol(env: Mapping[str, str]) -> str:
    """OTLP's protocol, gRPC where none is named. Raises ValueError for one that is not known."""
    protocol = next((env[name].strip() for name in PROTOCOLS if env.get(name, "").strip()), "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"{PROTOCOLS[1]}={protocol} is not supported: set grpc or http/protobuf")
    return protocol
