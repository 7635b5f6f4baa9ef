"""Guard before every method of a gRPC server: checks the caller and the request, and turns errors into statuses.

A call ends with UNAUTHENTICATED when its token or certificate is not the fleet's, with PERMISSION_DENIED when the kind
of its caller may not call the method (kinds.py), and with INVALID_ARGUMENT when its request is not a message.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from redis.exceptions import RedisError

from flowfleet.errors import FlowfleetError, InvalidRequest, Unavailable, grpc_code
from flowfleet.lru import LruCache
from flowfleet.process import service
from flowfleet.redis.trouble import trouble
from flowfleet.rpc import kinds, tls
from flowfleet.rpc.kinds import Caller, Callers

MAX_ERROR_BYTES: Final = 2000  # a status travels in trailers, which are limited to 8 KiB, as up to three bytes a byte

MAX_JOBS: Final = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The job of the token of a job's trainer; "" for other callers."""

    id: str = ""
    refusal: str = ""


class Guard(grpc.aio.ServerInterceptor):
    """Checks the token and the name in the client's certificate, and turns exceptions into canonical codes."""

    def __init__(self, callers: Callers, name: str | None) -> None:
        self._callers = callers
        self._name = name
        self._attempts: LruCache[str, int] = LruCache(MAX_JOBS)
        """Job → its newest trainer that has called."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = text(handler_call_details.method)
        token = self._token(handler_call_details.invocation_metadata)
        kind = self._callers.kind_of(token) if token else None
        job = self._job(token) if token else Job()
        if behavior := self._instead(kind, method, handler):
            return grpc.stream_unary_rpc_method_handler(
                _guard_unary(behavior, method, self._name, job), None, handler.response_serializer
            )
        wrap, make = (
            (_guard_stream, grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (_guard_unary, grpc.unary_unary_rpc_method_handler)
        )
        behavior, read = handler.unary_stream or handler.unary_unary, _reader(handler.request_deserializer)
        return make(wrap(behavior, method, self._name, job), read, handler.response_serializer)

    def _token(self, metadata: Any) -> str:
        sent = str(dict(metadata or ()).get("authorization", ""))
        return sent.removeprefix("Bearer ") if sent.startswith("Bearer ") else ""

    def _job(self, token: str) -> Job:
        """The job that the token is of alone, and why it opens nothing any more."""
        found = self._callers.trainer_of(token)
        if found is None:
            return Job()
        job_id, attempt = found
        if attempt < (self._attempts.get(job_id) or 0):
            return Job(job_id, f"a later attempt has replaced this trainer of job {job_id}: it must end")
        self._attempts.put(job_id, attempt)
        return Job(job_id)

    def _instead(self, kind: Caller | None, method: str, handler: Any) -> Callable[..., Awaitable[Any]] | None:
        """Returns the handler that answers a caller who may not call the method; None for a caller who may.

        It receives no request: strangers could fill the memory with messages that they begin and do not end. Probes
        carry no token, so the health check needs none; a stranger's is for the whole server.
        """
        if not self._callers or (kind is not None and kinds.may_call(kind, method)):
            return None
        if kind is not None:
            return _deny(f"the token of a {kind}", method)
        if kinds.is_health(method) and handler.unary_unary is not None:
            for_all = handler.request_deserializer(b"")

            async def answer(_requests: Any, context: Any) -> Any:
                return await handler.unary_unary(for_all, context)

            return answer
        return _refuse


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Reads a request. What is not a message becomes the `InvalidRequest` that ends the call: gRPC would log a
    traceback and answer UNKNOWN."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:
            return InvalidRequest(f"the request is not a message of this method: {error}")

    return read


async def _refuse(_request: Any, context: Any) -> None:
    message = f"send the token of {service.RPC_TOKEN} as metadata: authorization: Bearer <token>"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def _deny(proof: str, method: str) -> Callable[..., Awaitable[None]]:
    async def denied(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{proof} may not call {method}")

    return denied


async def _check(request: Any, context: Any, name: str | None, method: str, job: Job) -> None:
    """Ends the call unless the client's certificate carries the name and its kind may call; None takes any. Ends one
    whose request cannot be read, or is about another job than its token."""
    if job.refusal:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, job.refusal)
    if name is not None:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if name.encode() not in names:
            message = f"the client's certificate is not for {name}: reissue it, or set {tls.TLS_NAME}"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        shown = kinds.of_certificate(names, name)
        if shown and not any(kinds.may_call(kind, method) for kind in shown):
            await _deny(f"the certificate of a {shown[0]}", method)(None, context)
    if isinstance(request, InvalidRequest):
        raise request
    if job.id and (asked := getattr(request, "job_id", job.id)) != job.id:
        message = f"the token of job {job.id}'s trainer opens nothing of job {asked[:200]!r}"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)


def _guard_unary(
    behavior: Callable[..., Any], method: str, name: str | None, job: Job
) -> Callable[..., Awaitable[Any]]:
    """Guards coroutine functions, and plain functions, which run in a thread."""

    async def guarded(request: Any, context: Any) -> Any:
        try:
            await _check(request, context, name, method, job)
            if inspect.iscoroutinefunction(behavior):
                return await behavior(request, context)
            return await asyncio.to_thread(behavior, request, context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(
    behavior: Callable[..., Any], method: str, name: str | None, job: Job
) -> Callable[..., AsyncIterator[Any]]:
    """Guards async generators, and coroutine functions that use `context.write`."""

    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            await _check(request, context, name, method, job)
            if not inspect.isasyncgenfunction(behavior):
                await behavior(request, context)
                return
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: Any, method: str) -> None:
    """Ends the call. A handler's own `context.abort` passes through."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RedisError) and (reason := trouble(error)):
        error = Unavailable(reason)
    code = grpc_code(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, FlowfleetError):
        log.error("%s failed", method, exc_info=error)
        await context.abort(code, f"{method} failed inside the service; its log has the reason")
    # as far as a status can carry it: a caller's own text may be part of it
    start = str(error)[:MAX_ERROR_BYTES].encode(errors="replace")[:MAX_ERROR_BYTES]
    message = start.decode(errors="ignore") or code.name
    is_ours = type(error) is ValueError and len(str(error)) <= MAX_ERROR_BYTES  # a long one quotes its caller
    log.warning("%s: %s: %s", method, code.name, message, exc_info=error if is_ours else None)
    await context.abort(code, message)


def text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
