"""A span a call, at both ends, where traces are on (flowfleet/process/traces.py); else no interceptor at all.

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
    from opentelemetry.trace import Span

    from flowfleet.process.spans import Tracer

_HEADER: Final = "traceparent"
_ending: Final = set[asyncio.Task[None]]()
"""Calls whose status is being read; the loop keeps only weak references."""


def of_client(address: str) -> list[Any]:
    """Interceptors of a channel to this address."""
    tracer = traces.tracer()
    return [] if tracer is None else [_Unary(tracer, address), _Stream(tracer, address)]


def of_server() -> list[Any]:
    """Interceptors of a server."""
    tracer = traces.tracer()
    return [] if tracer is None else [_Served(tracer)]


class _Caller:
    """Stands next to the wire: a call ends when gRPC says so, whoever still waits for it."""

    def __init__(self, tracer: Tracer, address: str) -> None:
        self._tracer = tracer
        self._attributes = {"rpc.system": "grpc", "server.address": address}  # few: each costs, and the server has more

    async def _call(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        span = self._tracer.call(_described(details.method)[0], self._attributes)
        if span is None:
            return await continuation(details, request)
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (_HEADER, self._tracer.header(span)))
        details = grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
        try:
            call = await continuation(details, request)
        except BaseException:
            span.end()
            raise
        call.add_done_callback(functools.partial(_end_soon, self._tracer, span))
        return call


class _Unary(_Caller, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)


class _Stream(_Caller, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)


def _end_soon(tracer: Tracer, span: Span, call: Any) -> None:
    task = asyncio.ensure_future(_end(tracer, span, call, time.time_ns()))
    _ending.add(task)
    task.add_done_callback(_ending.discard)


async def _end(tracer: Tracer, span: Span, call: Any, end_ns: int) -> None:
    code = await call.code()
    tracer.end(span, "" if code is grpc.StatusCode.OK else f"{code.name}: {await call.details()}", end_ns)


class _Served(grpc.aio.ServerInterceptor):
    """Behind the guard, so that what may not call leaves no span."""

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
