"""The OpenAPI page, made exact where FastAPI cannot know: the job's schema, and errors as problems."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from flowfleet.api.jobs import AskedSweep
from flowfleet.api.problems import Problem
from flowfleet.api.votes import Asked, Ballot
from flowfleet.job.spec import JobSpec
from flowfleet.rewards.changes import RewardChange
from services.controller.api.problems import MEDIA_TYPE
from services.controller.api.sessions import COOKIE

_REF = "#/components/schemas/{model}"
_BODIES: dict[tuple[str, str], type[BaseModel]] = {
    ("/v1/jobs", "post"): JobSpec,
    ("/v1/sweeps", "post"): AskedSweep,
    ("/v1/jobs/{job_id}/rewards", "patch"): RewardChange,
    ("/v1/jobs/{job_id}/votes/groups/{step}/{group}", "put"): Asked,
    ("/v1/jobs/{job_id}/votes", "post"): Ballot,
}
"""Bodies that handlers read by themselves."""
_HEADERS = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in (
        ("Retry-After", "Of 503 and 507: seconds after which to try again."),
        ("WWW-Authenticate", "Of 401."),
        ("Allow", "Of 405: the methods of the path."),
    )
}


def install(app: FastAPI) -> None:
    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _exact(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _exact(page: dict[str, Any]) -> dict[str, Any]:
    schemas = page["components"]["schemas"]
    sent = ((model, "validation") for model in _BODIES.values())
    bodies = [*sent, (Problem, "serialization")]
    _, ours = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    schemas.update(ours["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["JobRecord"]["properties"]["spec"] = {"$ref": _REF.format(model="JobSpec")}
    for (path, method), model in _BODIES.items():
        body = {"required": True, "content": _content("application/json", model.__name__)}
        page["paths"][path][method]["requestBody"] = body
    upload = page["paths"]["/v1/uploads/{sha256}/{name}"]["put"]
    login = page["paths"]["/v1/session"]["post"]
    key = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    login["requestBody"] = {"required": True, "content": {"application/json": {"schema": key}}}
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    upload["requestBody"] = {"required": True, "content": octets}
    problem = {"description": "Problem", "headers": _HEADERS, "content": _content(MEDIA_TYPE, "Problem")}
    for path in page["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = problem
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _present(parameter["schema"])
    page["components"]["schemas"] = dict(sorted(schemas.items()))
    page["components"]["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
    }
    page["security"] = [{"key": []}, {"bearer": []}, {"session": []}, {}]
    return page


def _present(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter that is given: an optional one may be absent, but has no null in a URL or header."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name != "anyOf"}
    return {**kinds[0], **rest} if len(kinds) == 1 else schema


def _content(media_type: str, model: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(model=model)}}}
