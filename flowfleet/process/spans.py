"""Spans by the OpenTelemetry SDK. Imported only where traces are on (traces.py)."""

import functools
import importlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_NAMESPACE, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
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


class OpenSpan(NonRecordingSpan):
    """A span that runs. The SDK's `ReadableSpan` is made of it when it ends: its own, which can be read all the while,
    costs six times as much. One that never ends is never sent."""

    def __init__(self, name: str, parent: SpanContext, own_id: int, kind: SpanKind, attributes: Attributes) -> None:
        super().__init__(SpanContext(parent.trace_id, own_id, is_remote=False, trace_flags=parent.trace_flags))
        self.name = name
        self.parent = parent
        self.kind_of = kind
        self.attributes = attributes
        self.links: list[Link] = []
        self.start_ns = time.time_ns()

    @property
    def is_sampled(self) -> bool:
        return self.get_span_context().trace_flags.sampled


class Tracer:
    """Makes spans, which a thread exports. Drops them where no collector answers."""

    def __init__(self, service: str, protocol: str) -> None:
        """ImportError where the exporter of the protocol is not installed, ValueError for settings that cannot work."""
        attributes: dict[str, str | int] = {SERVICE_NAMESPACE: "flowfleet", "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes[SERVICE_NAME] = f"flowfleet-{service}"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._root = functools.lru_cache(maxsize=1024)(self._sampled_root)

    def close(self) -> None:
        """Sends what is left. Gives up after three seconds, so that an absent collector does not delay an end."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    # -- a step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def command(self, ids: StepIds, name: str, attributes: Attributes, waits: type[Exception]) -> Iterator[None]:
        """Runs a command in a span below the first of a step's trace. A span that ends by `waits` is not sent, because
        the command is repeated while there is nothing to do."""
        with self._running(self._open(name, self._root(ids), SpanKind.INTERNAL, attributes), waits):
            yield

    def step(self, ids: StepIds, attributes: Attributes, start_s: float, end_s: float) -> None:
        """The first span of a step's trace, once the step is done. Times are Unix seconds."""
        times = {"start_time": int(start_s * _NS), "end_time": int(end_s * _NS)}
        self._send("step", self._root(ids), attributes=attributes, **times)

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, name: str, attributes: Attributes) -> OpenSpan | None:
        """A call that begins; None outside of a trace, as for the polls of a fleet. To be ended."""
        parent = trace.get_current_span().get_span_context()
        return self._open(name, parent, SpanKind.CLIENT, attributes) if parent.is_valid else None

    def end(self, span: OpenSpan, problem: str = "", end_ns: int | None = None) -> None:
        """Sends a span; `problem` is the kind of its failure; empty where it succeeded."""
        if span.is_sampled:
            self._send(
                span.name,
                span.get_span_context(),
                parent=span.parent if span.parent.is_valid else None,
                attributes=span.attributes,
                links=span.links,
                kind=span.kind_of,
                status=Status(StatusCode.ERROR, problem) if problem else Status(StatusCode.UNSET),
                start_time=span.start_ns,
                end_time=time.time_ns() if end_ns is None else end_ns,
            )

    @contextmanager
    def serving(self, name: str, header: str, attributes: Attributes) -> Iterator[None]:
        """The work of a call that came with this context."""
        with self._running(self._open(name, _context_of(header), SpanKind.SERVER, attributes)):
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
        """Links the span to each call that made some of the samples, with their names as an attribute. A link points to
        a span, and samples have none of their own."""
        span = trace.get_current_span()
        if not isinstance(span, OpenSpan) or not span.is_sampled:
            return
        made: dict[str, list[str]] = defaultdict(list)
        for sample in samples:
            made[sample.traceparent].append(f"{sample.id.group}/{sample.id.index}")
        for header, names in made.items():
            if (context := _context_of(header)).is_valid:
                span.links.append(Link(context, {"flowfleet.samples": " ".join(names)}))  # a list costs a value each

    # -- the rest --------------------------------------------------------------------------------------------------

    def _sampled_root(self, ids: StepIds) -> SpanContext:
        """OTEL_TRACES_SAMPLER decides by the trace's id, so every process and every restart decides alike."""
        decision = self._provider.sampler.should_sample(None, ids.trace, "step").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags)

    def _open(self, name: str, parent: SpanContext, kind: SpanKind, attributes: Attributes) -> OpenSpan:
        return OpenSpan(name, parent, self._provider.id_generator.generate_span_id(), kind, attributes)

    def _send(self, name: str, context: SpanContext, **fields: Any) -> None:
        resource = self._provider.resource
        self._processor.on_end(ReadableSpan(name, context, resource=resource, instrumentation_scope=_SCOPE, **fields))

    @contextmanager
    def _running(self, span: OpenSpan, waits: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """The current span, ended with the error that the block raises; not ended, so never sent, by `waits`."""
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except waits:
                raise
            except BaseException as error:
                # The class or the gRPC code. Words, which may quote prompts and judges, are in the log alone.
                code = getattr(error, "code", None)
                self.end(span, str(code().name) if callable(code) else type(error).__name__)
                raise
            self.end(span)


def _context_of(header: str) -> SpanContext:
    return trace.get_current_span(_PROPAGATOR.extract({HEADER: header}, Context())).get_span_context()
