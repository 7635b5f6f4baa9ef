"""gRPC as every service speaks it: asyncio, message limits, deadlines, retries, TLS, tokens, canonical errors.

Client: `open_channel`. Every call needs `timeout=`; UNAVAILABLE is retried by service config, at most four attempts (a
stream only before its first message). Server: `make_server`, then `serve`, which runs until SIGTERM or SIGINT and
drains. An exception of `flowfleet.errors`, or a ValueError, reaches the caller as its code and message; any
other one as INTERNAL without its text, which is logged. Every call but the health check must carry a token that may
call the method (kinds.py). With FLOWFLEET_TLS_DIR set, both ends show a certificate (tls.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from flowfleet.errors import Unavailable
from flowfleet.process import service
from flowfleet.rpc import calls, kinds, tls
from flowfleet.rpc.guard import Guard, text
from flowfleet.rpc.kinds import Callers

MAX_MESSAGE_BYTES: Final = 64 * 2**20
_MS: Final = 1000
_WATCH_EVERY_S: Final = 1.0

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
_RETIRE_S: Final = 24 * 3600.0  # a channel of old certificates serves the calls that it has for so long
_SERVER_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5 * _MS),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls silently
]
_OPEN_OPTIONS: Final = [
    *(option for option in _SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", 2**16),  # anyone may call, and begin messages that never end
]

_UNTRUSTED: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(: OK)?$")
_CLOSED: Final = ("Socket closed", "Connection reset", "Broken pipe")

log = logging.getLogger(__name__)


def open_channel(address: str, *, token: str | None = None) -> grpc.aio.Channel:
    """Opens a channel to host:port; the token comes from the environment unless given. Close it with `await close()`.
    ValueError for an address that is not host:port, and for certificates that cannot work."""
    service.check_address(address)
    token, certificates = token or service.secret(service.RPC_TOKEN), tls.from_env()
    traced = calls.of_client(address)
    interceptors: list[Any] = [_UnaryRules(token, traced, address, certificates), _StreamRules(token, traced)]
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS, interceptors=interceptors)
    options = [*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", certificates.name)]

    def connect(identity: tls.Identity) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.chain)
        return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)

    return _RenewedChannel(connect, certificates)


def open_channel_with(address: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    """Opens a channel with the caller's own TLS credentials, for a service outside the fleet."""
    token = service.secret(service.RPC_TOKEN)
    interceptors: list[Any] = [_UnaryRules(token, None, address, None), _StreamRules(token)]
    return grpc.aio.secure_channel(address, credentials, options=_CLIENT_OPTIONS, interceptors=interceptors)


def make_server(*, token: str | None = None, guarded: bool = True) -> grpc.aio.Server:
    """Creates a server without services and without an address. The token comes from the environment unless given.

    `guarded=False`, which `listen` needs as well, checks neither a token nor the fleet's name in a client's
    certificate. It is for foreign protocols such as KEDA's. With TLS their clients still need a certificate of the CA.
    """
    certificates = tls.from_env()
    name = certificates.name if certificates and guarded else None
    callers = (Callers(token) if token else kinds.callers_from_env()) if guarded else Callers()
    guard = Guard(callers, name)
    options = _SERVER_OPTIONS if guarded else _OPEN_OPTIONS
    traced = calls.of_server() if guarded else []
    return grpc.aio.server(interceptors=[guard, *traced], options=options)


class HealthState:
    """The standard health service for "" and each full name, as "flowfleet.v1.RewardService". Starts not serving.

    Kubelets ask for "" in every probe, and restart what denies it for long: only what a restart cures may deny it while
    the service runs, not work that takes long, nor another service's absence.
    """

    def __init__(self, *services: str) -> None:
        self._names = ("", *services)
        self._servicer = health_aio.HealthServicer()

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server that has not started."""
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Tells all watchers."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def shut_down(self) -> None:
        """Reports NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()


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
    is_stuck: Callable[[], bool] | None = None,
    stop: asyncio.Event | None = None,
    grace_s: float = 30.0,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop`; then health says NOT_SERVING, `on_drain` runs, calls get `grace_s` more.

    `on_serving` gets host:port once calls are answered, before health says SERVING and the port file is written.
    Health denies while `is_stuck` says that the service's work makes no progress: somebody then kills the process.
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
    watch = asyncio.create_task(_watch(health, is_stuck)) if is_stuck is not None else None
    await stop.wait()
    if watch is not None:
        watch.cancel()
    log.info("draining")
    await health.shut_down()
    if on_drain is not None:
        await on_drain()
    await server.stop(grace_s)
    if probes is not None:
        await probes.stop(None)
    log.info("stopped")


async def _watch(health: HealthState, is_stuck: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(_WATCH_EVERY_S)
        await health.set_serving(not is_stuck())


async def _serve_probes(health: HealthState, host: str, port: int) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=[Guard(Callers(), None)], options=_OPEN_OPTIONS)
    await health.register(server)
    bound = _bind(server, host, port, None, "--health-port")
    await server.start()
    log.info("serving health on %s", service.format_address(host, bound))
    return server


def listen(server: grpc.aio.Server, host: str, port: int, *, guarded: bool = True) -> int:
    """Binds the server and returns the port. For `serve`, for tests, and for servers that are not `guarded`."""
    if guarded:
        service.require_secret(host, service.RPC_TOKEN)
    return _bind(server, host, port, tls.from_env(), "--port")


def _bind(server: grpc.aio.Server, host: str, port: int, certificates: tls.Certificates | None, flag: str) -> int:
    address = service.format_address(host, port)
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _server_credentials(certificates))
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: choose another --host or {flag} ({error})") from None


def _server_credentials(certificates: tls.Certificates) -> grpc.ServerCredentials:
    """Asks clients for certificates; each connection is made with the files of that moment."""
    shown = certificates.current()

    def configuration(identity: tls.Identity) -> Any:
        return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], identity.ca)

    def renewed() -> Any:
        """None while nothing has changed. Called by gRPC's threads before each handshake."""
        nonlocal shown
        if (identity := certificates.current()) is shown:
            return None
        shown = identity
        return configuration(identity)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), renewed, require_client_authentication=True)


def rpc_error_message(error: BaseException) -> str:
    """Returns an error in one line for logs and records, such as "UNAVAILABLE: connection refused"."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


class _Rules:
    """Refuses calls without a deadline, adds the token, and traces."""

    def __init__(self, token: str | None, traced: calls.Caller | None = None) -> None:
        self._token = token
        self._traced = traced

    async def _begin(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        if details.timeout is None:
            raise ValueError(f"{text(details.method)} was called without a deadline: pass timeout=<seconds>")
        begun = self._traced.begin(details.method) if self._traced else None
        added = [("authorization", f"Bearer {self._token}")] if self._token is not None else []
        added += [begun.metadata] if begun else []
        if added:
            metadata = grpc.aio.Metadata(*(details.metadata or ()), *added)
            details = grpc.aio.ClientCallDetails(
                details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
            )
        try:
            call = await continuation(details, request)
        except BaseException:
            if begun:
                begun.fails()
            raise
        if begun:
            begun.ends_with(call)
        return call


class _UnaryRules(_Rules, grpc.aio.UnaryUnaryClientInterceptor):
    """Rules that also explain TLS mismatches between the two ends, which gRPC reports obscurely or not at all."""

    def __init__(
        self, token: str | None, traced: calls.Caller | None, address: str, certificates: tls.Certificates | None
    ) -> None:
        super().__init__(token, traced)
        self._address = address
        self._certificates = certificates

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = await self._begin(continuation, client_call_details, request)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            reason = await self._tls_problem(error) if error.code() is grpc.StatusCode.UNAVAILABLE else None
            if reason is None:
                raise
            raise grpc.aio.AioRpcError(
                error.code(), error.initial_metadata(), error.trailing_metadata(), details=reason
            ) from None
        return call

    async def _tls_problem(self, error: grpc.aio.AioRpcError) -> str | None:
        details = error.details() or ""
        if match := _UNTRUSTED.search(details):
            return f"the certificate of {self._address} is refused: {match[1]}"
        if "Hostname Verification" in details and self._certificates:
            name = self._certificates.name
            return f"the certificate of {self._address} is not for {name}: reissue it, or set {tls.TLS_NAME}"
        if "WRONG_VERSION_NUMBER" in details:
            return f"{self._address} speaks no TLS: set {tls.TLS_DIR} for that service as well"
        if any(sign in details for sign in _CLOSED):
            return await asyncio.to_thread(tls.why_closed, self._address, self._certificates)
        return None


class _StreamRules(_Rules, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._begin(continuation, client_call_details, request)


class _RenewedChannel(grpc.aio.Channel):
    """Reopens once the certificates have changed. Running calls end on the channel that they began on."""

    def __init__(self, connect: Callable[[tls.Identity], grpc.aio.Channel], certificates: tls.Certificates) -> None:
        self._connect = connect
        self._certificates = certificates
        self._identity = certificates.current()
        self._channel = connect(self._identity)
        self._retiring: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        if (identity := self._certificates.current()) is not self._identity:
            retiring = asyncio.ensure_future(self._channel.close(_RETIRE_S))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._identity, self._channel = identity, self._connect(identity)
        return self._channel

    async def __aenter__(self) -> _RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for retiring in self._retiring:
            retiring.cancel()
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **more: self.current().unary_unary(*method, **options)(*call, **more)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **more: self.current().unary_stream(*method, **options)(*call, **more)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **more: self.current().stream_unary(*method, **options)(*call, **more)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **more: self.current().stream_stream(*method, **options)(*call, **more)
