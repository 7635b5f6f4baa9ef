"""gRPC as every service speaks it: asyncio, explicit message limits, deadlines, retries, tokens, canonical errors.

Client: `open_channel`. Every call needs `timeout=`; UNAVAILABLE is retried by service config, at most four attempts (a
stream only before its first message). Server: `make_server`, then `serve`, which runs until SIGTERM or SIGINT and
drains. An exception of `flowfleet.errors`, or a ValueError, reaches the caller as its code and message; any
other one as INTERNAL without its text, which is logged. With a token set, every call but the health check must carry
it.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from flowfleet import service
from flowfleet.errors import Unavailable, grpc_code

LIVENESS: Final = "liveness"
"""What a liveness probe asks the health service for."""
MAX_MESSAGE_BYTES: Final = 64 * 2**20
MAX_ERROR_LENGTH: Final = 2000  # a status travels in trailers, which are limited to 8 KiB
_MS: Final = 1000

RETRY_POLICY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 4,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_LIMITS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
_CLIENT_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": RETRY_POLICY}]})),
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),  # a larger request than the buffer is never retried
    ("grpc.keepalive_time_ms", 20 * _MS),
    ("grpc.keepalive_timeout_ms", 20 * _MS),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2 * _MS),
    ("grpc.enable_http_proxy", 0),  # the fleet is never behind the proxy that reaches the internet
]
_SERVER_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5 * _MS),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls silently
]

log = logging.getLogger(__name__)


def token_from_env() -> str | None:
    """`FLOWFLEET_RPC_TOKEN`, None when unset or empty."""
    return os.environ.get(service.RPC_TOKEN) or None


def open_channel(address: str, *, token: str | None = None) -> grpc.aio.Channel:
    """A channel to host:port; the token comes from the environment unless given. Close it with `await close()`."""
    token = token or token_from_env()
    interceptors: list[Any] = [_UnaryRules(token), _StreamRules(token)]
    return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS, interceptors=interceptors)


def make_server(interceptors: Sequence[Any] = (), *, token: str | None = None) -> grpc.aio.Server:
    """A server without services and without an address. The token comes from the environment unless given."""
    guard = _Guard(token or token_from_env())
    return grpc.aio.server(interceptors=[guard, *interceptors], options=_SERVER_OPTIONS)


class HealthState:
    """The standard health service. Starts alive and not serving.

    "" and each full name, as "flowfleet.v1.RewardService": it takes calls, which readiness probes ask for. "liveness":
    it is not stuck. Only what a restart cures may deny that: not work that takes long, nor another service's absence.
    """

    def __init__(self, *services: str) -> None:
        self._names = ("", *services)
        self._servicer = health_aio.HealthServicer()
        self._is_over = False

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server that has not started."""
        await self.set_serving(False)
        await self.set_alive(True)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Tells all watchers."""
        for name in self._names:
            await self._set(name, serving and not self._is_over)

    async def set_alive(self, alive: bool) -> None:
        """Tells all watchers."""
        await self._set(LIVENESS, alive)

    async def shut_down(self) -> None:
        """Not serving, for good, and still alive."""
        self._is_over = True
        await self.set_serving(False)

    async def _set(self, name: str, good: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(name, status.SERVING if good else status.NOT_SERVING)


async def serve(
    server: grpc.aio.Server,
    *,
    host: str,
    port: int = 0,
    port_file: Path | None = None,
    health_port: int | None = None,
    health: HealthState,
    on_serving: Callable[[str], Awaitable[object]] | None = None,
    on_drain: Callable[[], Awaitable[object]] | None = None,
    stop: asyncio.Event | None = None,
    grace_s: float = 30.0,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop`; then health says NOT_SERVING, `on_drain` runs, calls get `grace_s` more.

    `on_serving` gets host:port once calls are answered, before health says SERVING and the port file is written.
    `health_port` answers the health service alone, without TLS, for kubelets, which speak none and have no token.
    ValueError beyond loopback without a token; Unavailable when a port is taken.
    """
    stop = stop or asyncio.Event()
    await health.register(server)
    address = service.format_address(host, listen(server, host, port))
    probes = None if health_port is None else await _serve_probes(health, host, health_port)
    await server.start()
    service.stop_on_signals(stop)
    if on_serving is not None:
        await on_serving(address)
    await health.set_serving(True)
    service.write_port_file(port_file, address)
    log.info("serving on %s", address)
    await stop.wait()
    log.info("draining")
    await health.shut_down()
    if on_drain is not None:
        await on_drain()
    await server.stop(grace_s)
    if probes is not None:
        await probes.stop(None)
    log.info("stopped")


async def _serve_probes(health: HealthState, host: str, port: int) -> grpc.aio.Server:
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    await health.register(server)
    bound = _bind(server, host, port, "--health-port")
    await server.start()
    log.info("health on %s", service.format_address(host, bound))
    return server


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Binds the server and returns the port. For tests and `serve`."""
    service.require_secret(host, service.RPC_TOKEN)
    return _bind(server, host, port, "--port")


def _bind(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
    address = service.format_address(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: choose another --host or {flag} ({error})") from None


def rpc_error_message(error: BaseException) -> str:
    """One line for logs and records: "UNAVAILABLE: connection refused"."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


class _Rules:
    """Refuses calls without a deadline and adds the token."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def _apply(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        if details.timeout is None:
            raise ValueError(f"{_text(details.method)} was called without a deadline: pass timeout=<seconds>")
        if self._token is None:
            return details
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {self._token}"))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryRules(_Rules, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._apply(client_call_details), request)


class _StreamRules(_Rules, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._apply(client_call_details), request)


class _Guard(grpc.aio.ServerInterceptor):
    """Checks the token, and turns exceptions into canonical codes."""

    def __init__(self, token: str | None) -> None:
        self._expected = f"Bearer {token}".encode() if token else None

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = _text(handler_call_details.method)
        wrap, make = (
            (_guard_stream, grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (_guard_unary, grpc.unary_unary_rpc_method_handler)
        )
        behaviour = handler.unary_stream or handler.unary_unary
        if not self._admits(method, handler_call_details.invocation_metadata):
            behaviour = _refuse
        return make(wrap(behaviour, method), handler.request_deserializer, handler.response_serializer)

    def _admits(self, method: str, metadata: Any) -> bool:
        """Probes carry no token, so the health check needs none."""
        if self._expected is None or method.startswith("/grpc.health.v1.Health/"):
            return True
        sent = dict(metadata or ()).get("authorization", "")
        return hmac.compare_digest(str(sent).encode(), self._expected)


async def _refuse(_request: Any, context: Any) -> None:
    message = f"send the token of {service.RPC_TOKEN} as metadata: authorization: Bearer <token>"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def _guard_unary(behaviour: Callable[..., Any], method: str) -> Callable[..., Awaitable[Any]]:
    """For coroutine functions, and for plain functions, which run in a thread."""

    async def guarded(request: Any, context: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(behaviour):
                return await behaviour(request, context)
            return await asyncio.to_thread(behaviour, request, context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    """For async generators, and for coroutine functions, which use `context.write`."""

    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            if not inspect.isasyncgenfunction(behaviour):
                await behaviour(request, context)
                return
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: Any, method: str) -> None:
    """Ends the call. A handler's own `context.abort` passes through."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code = grpc_code(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("%s failed", method, exc_info=error)
        await context.abort(code, f"{method} failed inside the service; its log has the reason")
    log.warning("%s: %s: %s", method, code.name, error, exc_info=error if type(error) is ValueError else None)
    await context.abort(code, (str(error) or code.name)[:MAX_ERROR_LENGTH])


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
