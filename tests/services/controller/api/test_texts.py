"""Texts of any length and content in jobs, paths, queries and headers: refused in words, never an error of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from services.controller.api.problems import MEDIA_TYPE
from services.controller.jobs.submission.checks import parse
from tests.services.controller.conftest import Api

LONG, NUL, LONG_NAME, LONG_PATH = "a" * 500_000, "a\0b", "/" + "b" * 300, "/b" * 3000
HOSTILE = {"long": LONG, "nul": NUL, "long name": LONG_NAME, "long path": LONG_PATH}


def texts(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Places of all texts of a job, and of its settings that may be a text."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(child, (*place, key))
    elif isinstance(value, str) or value is None:
        yield place


def changed(job: dict[str, Any], place: tuple[str | int, ...], text: str) -> dict[str, Any]:
    made: Any = copy.deepcopy(job)
    part = made
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = text
    return dict(made)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_every_text_of_a_job(api: Api, job: Callable[..., dict[str, Any]], text: str) -> None:
    whole = parse(job()).model_dump(mode="json")
    places = list(texts(whole))
    assert {("model", "path"), ("data", "train"), ("name",), ("model", "adapter")} <= {*places}
    for place in places:
        answer = await api.client.post("/v1/jobs", json=changed(whole, place, text))
        assert answer.status_code < 500, (place, answer.text)
        if text in (LONG, NUL) or place in (("model", "path"), ("data", "train"), ("model", "adapter")):
            assert (answer.status_code in (400, 413, 422), bool(answer.json()["detail"])) == (True, True), place
    (named,) = (await api.client.post("/v1/jobs", json=whole | {"a" * 100_000: 1})).json()["detail"].splitlines()
    assert "more than" in named


@pytest.mark.parametrize("text", [LONG, NUL], ids=["long", "nul"])
async def test_every_parameter_of_every_call(api: Api, job: Callable[..., dict[str, Any]], text: str) -> None:
    job_id = (await api.client.post("/v1/jobs", json=job())).json()["id"]
    text = text[:60_000]  # of a URL
    paths = (await api.client.get("/openapi.json")).json()["paths"]
    known = {"job_id": job_id, "step": "0", "group": "0", "index": "0", "sha256": "0" * 64, "name": "a.txt"}
    for path, calls in paths.items():
        for method, call in calls.items():
            for parameter in call.get("parameters", ()):
                name, where = parameter["name"], parameter["in"]
                if where == "header" and text == NUL:
                    continue  # no client and no server lets it through
                given = {key: text if (key, where) == (name, "path") else value for key, value in known.items()}
                answer = await api.client.request(
                    method,
                    path.format_map({key: quote(value, safe="") for key, value in {name: text, **given}.items()}),
                    params={name: text} if where == "query" else None,
                    headers={name: text} if where == "header" else None,
                    timeout=20,
                )
                assert answer.status_code < 500, (method, path, name, answer.text)
                if answer.status_code >= 400:
                    assert answer.headers["content-type"] == MEDIA_TYPE
