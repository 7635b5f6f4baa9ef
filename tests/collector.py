"""A stand-in for an OpenTelemetry collector: takes OTLP by gRPC, or by HTTP, on loopback and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc


@dataclass(frozen=True)
class Seen:
    """A span, or a link, as it came."""

    trace: str
    span: str
    parent: str = ""
    name: str = ""
    kind: int = 0
    service: str = ""
    pid: int = 0
    """Process that sent it."""
    attributes: dict[str, Any] | None = None
    links: tuple[Seen, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    error: str = ""

    def __getitem__(self, name: str) -> Any:
        return (self.attributes or {})[f"flowfleet.{name}"]


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.url = ""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            own = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, own) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Seen) -> list[Seen]:
        return [span for span in self.spans if (span.trace, span.parent) == (parent.trace, parent.span)]


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that serves at its `url`."""
    server, made = grpc.server(ThreadPoolExecutor(4)), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    """The same for OTLP by HTTP."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            made.Export(otlp.ExportTraceServiceRequest.FromString(sent), None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        service=resource["service.name"],
        pid=resource["process.pid"],
        attributes=_attributes(span.attributes),
        links=tuple(
            Seen(link.trace_id.hex(), link.span_id.hex(), attributes=_attributes(link.attributes))
            for link in span.links
        ),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == 2 else "",
    )


def _attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
