from __future__ import annotations

import json

import grpc
import pytest
import redis

from flowfleet import errors


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (ValueError("x"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (json.JSONDecodeError("x", "{", 0), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (errors.Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED, 401),
        (errors.NotFound("x"), grpc.StatusCode.NOT_FOUND, 404),
        (errors.Conflict("x"), grpc.StatusCode.FAILED_PRECONDITION, 409),
        (errors.TooLarge("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
        (errors.Unavailable("x"), grpc.StatusCode.UNAVAILABLE, 503),
        (redis.BusyLoadingError("x"), grpc.StatusCode.UNAVAILABLE, 503),
        (TimeoutError(), grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (errors.DataLoss("x"), grpc.StatusCode.DATA_LOSS, 500),
        (errors.Broken("x"), grpc.StatusCode.INTERNAL, 500),
        (KeyError("x"), grpc.StatusCode.INTERNAL, 500),
        (errors.FlowfleetError("x"), grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_each_exception_has_one_code_and_one_status(error: Exception, code: grpc.StatusCode, status: int) -> None:
    assert errors.grpc_code(error) is code
    assert errors.http_status(error) == status


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    ours = [error for error in errors.FlowfleetError.__subclasses__() if error.__module__ == errors.__name__]
    for error in ours:
        assert f"── {error.__name__} " in (errors.__doc__ or "")
