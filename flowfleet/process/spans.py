"""Spans by the OpenTelemetry SDK. Imported only where traces are on (traces.py)."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_NAMESPACE, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from flowfleet.process.traces import StepIds
from flowfleet.proto.common_pb2 import Sample

HEADER: Final = "traceparent"
Attributes = Mapping[str, str | int | float | Sequence[int] | Sequence[str]]

_EXPORTERS: Final = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_SCOPE: Final = InstrumentationScope("flowfleet")
CLOSE_S: Final = 3.0
_NS: Final = 1e9
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans, which a thread exports. Drops them where no collector answers."""

    def __init__(self, service: str, protocol: str) -> None:
        """ImportError where the exporter of the protocol is not installed, ValueError for settings that cannot work."""
        own: dict[str, str | int] = {SERVICE_NAMESPACE: "flowfleet", "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own[SERVICE_NAME] = f"flowfleet-{service}"
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(_SCOPE.name)
        self._root = functools.lru_cache(maxsize=1024)(self._sampled_root)

    def close(self) -> None:
        """Sends what is left. Gives up after three seconds, so that an absent collector does not delay an end."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    # -- a step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def command(self, ids: StepIds, name: str, attributes: Attributes, waits: type[Exception]) -> Iterator[None]:
        """One span below the first of a step's trace. One that ends by `waits` is not sent: it comes again and again
        while there is nothing to do."""
        parent = trace.set_span_in_context(NonRecordingSpan(self._root(ids)))
        with self._running(self._tracer.start_span(name, parent, attributes=attributes), waits):
            yield

    def step(self, ids: StepIds, attributes: Attributes, start_s: float, end_s: float) -> None:
        """The first span of a step's trace, once the step is done. Times are Unix seconds."""
        context = self._root(ids)
        span = ReadableSpan(
            "step",
            context,
            resource=self._provider.resource,
            attributes=attributes,
            instrumentation_scope=_SCOPE,
            start_time=int(start_s * _NS),
            end_time=int(end_s * _NS),
        )
        self._processor.on_end(span)

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, name: str, attributes: Attributes) -> Span | None:
        """A call that begins; None outside of a trace, as for the polls of a fleet. To be ended."""
        if not trace.get_current_span().get_span_context().is_valid:
            return None
        return self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)

    @staticmethod
    def end(span: Span, problem: str, end_ns: int) -> None:
        """Ends a call's span; `problem` says why it failed, empty where it did not."""
        if problem:
            span.set_status(Status(StatusCode.ERROR, problem))
        span.end(end_ns)

    @contextmanager
    def serving(self, name: str, header: str, attributes: Attributes) -> Iterator[None]:
        """The work of a call that came with this context."""
        parent = _PROPAGATOR.extract({HEADER: header}, Context())
        with self._running(self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)):
            yield

    @staticmethod
    def header(span: Span) -> str:
        """W3C context of a span, for the metadata of a call."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier.get(HEADER, "")

    # -- samples ---------------------------------------------------------------------------------------------------

    def traceparent(self) -> str:
        span = trace.get_current_span()
        return self.header(span) if span.get_span_context().trace_flags.sampled else ""

    def link(self, samples: Iterable[Sample]) -> None:
        """One link a call that made some of the samples, with their names as an attribute: a link is to a span, and a
        sample has none of its own."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        made: dict[str, list[str]] = defaultdict(list)
        for sample in samples:
            made[sample.traceparent].append(f"{sample.id.group}/{sample.id.index}")
        for header, names in made.items():
            if (context := _context_of(header)).is_valid:
                span.add_link(context, {"flowfleet.samples": " ".join(names)})  # a list would cost a value each

    # -- the rest --------------------------------------------------------------------------------------------------

    def _sampled_root(self, ids: StepIds) -> SpanContext:
        """OTEL_TRACES_SAMPLER decides by the trace's id, so every process and every restart decides alike."""
        decision = self._provider.sampler.should_sample(None, ids.trace, "step").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags)

    @staticmethod
    @contextmanager
    def _running(span: Span, waits: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """The current span, ended with the error that the block raises; not ended, so never sent, by `waits`."""
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except waits:
                raise
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, _message(error)))
                span.end()
                raise
            span.end()


def _message(error: BaseException) -> str:
    """One line, as in "TimeoutError: late"; of a failed call its own words."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):  # grpc.aio.AioRpcError, whose text has many lines
        return f"{code().name}: {details()}"
    return f"{type(error).__name__}: {error}"


def _context_of(header: str) -> SpanContext:
    return trace.get_current_span(_PROPAGATOR.extract({HEADER: header}, Context())).get_span_context()
