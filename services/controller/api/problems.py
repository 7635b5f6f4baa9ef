"""Errors as the REST API tells them: application/problem+json (RFC 9457).

A message of the project's own exceptions travels to the client; of any other exception it stays in the log.
"""

import http
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from flowfleet.api.problems import Problem, SettingProblem
from flowfleet.errors import FlowfleetError, http_status
from flowfleet.part import in_words
from flowfleet.redis.trouble import trouble
from services.controller.jobs.submission.problems import InvalidJob

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_PROBLEMS = 100
MAX_TEXT = 600
RETRY_S = "5"
FULL_RETRY_S = "60"
_SETTING = re.compile(r"[A-Za-z_][\w-]*(\.[\w*-]+)*")


def problem(
    status: int,
    detail: str,
    path: str,
    *,
    title: str | None = None,
    errors: Sequence[SettingProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = Problem(
        title=title or http.HTTPStatus(status).phrase,
        status=status,
        detail=_cut(detail),
        instance=_cut(path),
        errors=None if errors is None else list(errors[:MAX_PROBLEMS]),
    )
    content = json.dumps(body.model_dump(exclude_none=True))  # ASCII: whatever a client sent can be encoded
    return Response(content, status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answers errors as problems; `routes` are all of the app's."""
    app.add_exception_handler(FlowfleetError, _ours)
    app.add_exception_handler(RedisError, _redis)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, partial(_http, routes))
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, InvalidJob):
        errors = [SettingProblem(setting=_setting(text), detail=_cut(text)) for text in error.problems[:MAX_PROBLEMS]]
        count = f"{len(error.problems)} settings" if len(error.problems) > 1 else "1 setting"
        return problem(422, f"{error.what}: {count} to change", path, title="Invalid job", errors=errors)
    status = http_status(error)
    retry_s = {503: RETRY_S, 507: FULL_RETRY_S}.get(status)
    return problem(status, str(error), path, headers={"Retry-After": retry_s} if retry_s else None)


async def _redis(request: Request, error: Exception) -> Response:
    assert isinstance(error, RedisError)
    reason = trouble(error)
    if reason is None:
        raise error  # our own mistake: answered as 500, with a traceback in the log
    log.error("redis %s: %s", type(error).__name__, reason)
    return problem(503, reason, request.url.path, headers={"Retry-After": RETRY_S})


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        SettingProblem(setting=".".join(str(part) for part in item["loc"][1:]), detail=_cut(in_words(item)))
        for item in error.errors()
    ]
    detail = "; ".join(f"{item.setting}: {item.detail}" for item in errors)
    return problem(422, detail, request.url.path, title="Invalid request", errors=errors)


async def _http(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, headers = str(error.detail), error.headers
    if error.status_code == 404:
        detail = f"there is no {request.url.path}"
    elif error.status_code == 405:
        detail, headers = f"{request.method} is not possible here", {"Allow": _allowed(routes, request) or "GET"}
    return problem(error.status_code, detail, request.url.path, headers=headers)


def _allowed(routes: Sequence[BaseRoute], request: Request) -> str:
    """The methods of all routes of the path: Starlette names those of the first alone."""
    matching = [route for route in routes if isinstance(route, Route) and route.path_regex.match(request.url.path)]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _unexpected(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, so that the server logs its traceback."""
    detail = "an error of the controller; its log has the details"
    return problem(500, detail, request.url.path)


def _setting(message: str) -> str:
    found = _SETTING.match(message)
    return _cut(found.group()) if found else ""


def _cut(text: str) -> str:
    """The middle goes: what is wrong comes first, what to change comes last."""
    return text if len(text) <= MAX_TEXT else f"{text[:200]} … {text[3 - (MAX_TEXT - 200) :]}"
