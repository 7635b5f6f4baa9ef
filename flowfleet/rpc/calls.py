"""A span a call, at both ends, where traces are on (flowfleet/process/traces.py); else nothing at all.

The caller's context travels as `traceparent` in the metadata. Only calls of a trace are traced: the polls of a fleet,
and health checks, have none.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from flowfleet.process import traces

if TYPE_CHECKING:
    from flowfleet.process.spans import OpenSpan, Tracer

_HEADER: Final = "traceparent"
_ending: Final = set[asyncio.Task[None]]()
"""Calls whose status is being read; the loop keeps only weak references."""


def of_client(address: str) -> Caller | None:
    """Returns the tracer of the calls to this address; None while traces are off."""
    tracer = traces.tracer()
    return None if tracer is None else Caller(tracer, address)


def of_server() -> list[Any]:
    """Interceptors of a server."""
    tracer = traces.tracer()
    return [] if tracer is None else [_Served(tracer)]


class Caller:
    """Traces calls at the wire: a span ends when gRPC ends the call, even if the caller has stopped waiting. It is not
    an interceptor, because one would cost more than the span, most of all in streams."""

    def __init__(self, tracer: Tracer, address: str) -> None:
        self._tracer = tracer
        self._attributes = {"rpc.system": "grpc", "server.address": address}  # few: each costs, and the server has more

    def begin(self, method: str | bytes) -> Begun | None:
        """A call that begins; None outside of a trace."""
        span = self._tracer.call(_described(method)[0], self._attributes)
        return None if span is None else Begun(self._tracer, span)


class Begun:
    """A call that has begun: to be ended by `ends_with` or `fails`."""

    def __init__(self, tracer: Tracer, span: OpenSpan) -> None:
        self._tracer = tracer
        self._span = span
        self.metadata = (_HEADER, tracer.header(span))

    def fails(self) -> None:
        """It ends without having reached the wire."""
        self._tracer.end(self._span)

    def ends_with(self, call: Any) -> None:
        call.add_done_callback(functools.partial(_end_soon, self._tracer, self._span))


def _end_soon(tracer: Tracer, span: OpenSpan, call: Any) -> None:
    task = asyncio.ensure_future(_end(tracer, span, call, time.time_ns()))
    _ending.add(task)
    task.add_done_callback(_ending.discard)


async def _end(tracer: Tracer, span: OpenSpan, call: Any, end_ns: int) -> None:
    code = await call.code()
    tracer.end(span, "" if code is grpc.StatusCode.OK else code.name, end_ns)


class _Served(grpc.aio.ServerInterceptor):
    """Interceptor behind the guard, so that rejected callers leave no span."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        header = str(dict(handler_call_details.invocation_metadata or ()).get(_HEADER, ""))
        if handler is None or handler.request_streaming or not header:
            return handler
        name, attributes = _described(handler_call_details.method)
        serving = functools.partial(self._tracer.serving, name, header, attributes)
        if handler.response_streaming:
            return handler._replace(unary_stream=_stream(handler.unary_stream, serving))
        return handler._replace(unary_unary=_unary(handler.unary_unary, serving))


def _unary(behavior: Callable[..., Any], serving: Callable[[], Any]) -> Callable[..., Awaitable[Any]]:
    async def served(request: Any, context: Any) -> Any:
        with serving():
            if inspect.iscoroutinefunction(behavior):
                return await behavior(request, context)
            return await asyncio.to_thread(behavior, request, context)

    return served


def _stream(behavior: Callable[..., Any], serving: Callable[[], Any]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(behavior):
        return _unary(behavior, serving)

    async def served(request: Any, context: Any) -> AsyncIterator[Any]:
        with serving():
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

    return served


@functools.lru_cache(maxsize=256)
def _described(method: str | bytes) -> tuple[str, dict[str, str]]:
    """Name and attributes of a call's spans, as OpenTelemetry's conventions have them."""
    name = (method.decode() if isinstance(method, bytes) else method).lstrip("/")
    service, _, called = name.partition("/")
    return name, {"rpc.system": "grpc", "rpc.service": service, "rpc.method": called}
