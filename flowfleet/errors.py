"""The project's exceptions, and their one mapping to gRPC codes and to HTTP status.

    FlowfleetError
    ├── InvalidRequest    the caller must change something; so does any ValueError
    ├── Unauthenticated   no token, or a wrong one
    ├── NotFound          no such job, blob, …
    │   └── Gone          it was there and was deleted
    ├── Conflict          not in this state; the message names the state that would do
    ├── TooLarge          over a size limit
    ├── Full              no room: memory or disk has to be freed first
    ├── Unavailable       try again: the other side is down, draining or starting
    ├── OtherFormat       another version wrote it; the message says which one reads it
    ├── DataLoss          bytes are not what was written (size, checksum, malformed)
    └── Broken            a part of the service failed for good: it answers so, and ends

A message says what to change. It may travel to the caller; a message of any other exception never does.
"""

from collections.abc import Mapping
from typing import TypeVar

import grpc
import redis.exceptions


class FlowfleetError(Exception):
    """Base of all exceptions of the project."""


class InvalidRequest(FlowfleetError):
    """The caller must change something."""


class Unauthenticated(FlowfleetError):
    """No token, or a wrong one."""


class NotFound(FlowfleetError):
    """There is no such thing."""


class Gone(NotFound):
    """It was there and was deleted."""


class Conflict(FlowfleetError):
    """Not possible in the present state."""


class TooLarge(FlowfleetError):
    """Over a size limit."""


class Full(FlowfleetError):
    """No room: memory or disk has to be freed first."""


class Unavailable(FlowfleetError):
    """Try again later."""


class OtherFormat(FlowfleetError):
    """Written by another version of Flowfleet, in a format that this one does not read."""


class DataLoss(FlowfleetError):
    """Bytes are not what was written."""


class Broken(FlowfleetError):
    """A part of the service failed for good: it answers so, and ends."""


T = TypeVar("T")

_GRPC_CODES: Mapping[type[BaseException], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Full: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    redis.exceptions.ConnectionError: grpc.StatusCode.UNAVAILABLE,
    redis.exceptions.TimeoutError: grpc.StatusCode.UNAVAILABLE,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    OtherFormat: grpc.StatusCode.UNIMPLEMENTED,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    Broken: grpc.StatusCode.INTERNAL,
}

_HTTP_STATUS: Mapping[type[BaseException], int] = {
    InvalidRequest: 400,
    ValueError: 400,
    Unauthenticated: 401,
    NotFound: 404,
    Gone: 410,
    Conflict: 409,
    TooLarge: 413,
    Full: 507,
    Unavailable: 503,
    redis.exceptions.ConnectionError: 503,
    redis.exceptions.TimeoutError: 503,
    TimeoutError: 504,
    OtherFormat: 501,
    DataLoss: 500,
    Broken: 500,
}


def grpc_code(error: BaseException) -> grpc.StatusCode:
    """Canonical code of an exception; INTERNAL for what is not listed, which is our own mistake."""
    return _of_nearest_base(error, _GRPC_CODES, grpc.StatusCode.INTERNAL)


def http_status(error: BaseException) -> int:
    """HTTP status of an exception; 500 for what is not listed."""
    return _of_nearest_base(error, _HTTP_STATUS, 500)


def _of_nearest_base(error: BaseException, table: Mapping[type[BaseException], T], default: T) -> T:
    return next((table[base] for base in type(error).__mro__ if base in table), default)
