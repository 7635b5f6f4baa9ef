"""The way from a job to its traces: an address that the operator gives, and a path for each step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import serve

Job = Callable[..., dict[str, Any]]
REDIS = {"FLOWFLEET_REDIS_URL": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize("url", ["jaeger.example.com/{trace_id}", "https://jaeger.example.com/trace/"])
def test_an_address_is_a_url_with_a_place_for_the_id(url: str) -> None:
    with pytest.raises(ValueError, match="FLOWFLEET_TRACE_URL: give an http"):
        ControllerSettings.from_command_line([], {**REDIS, "FLOWFLEET_TRACE_URL": url})


async def test_a_job_leads_to_the_trace_of_each_of_its_steps(settings: ControllerSettings, job: Job) -> None:
    ui = "https://jaeger.example.com/trace/{trace_id}"
    async with serve(settings.model_copy(update={"trace_url": ui})) as api:
        submitted = await api.submit(job())
        shown: dict[str, Any] = (await api.client.get(f"/v1/jobs/{submitted['id']}")).json()
        assert shown["trace_url"] == f"/v1/jobs/{submitted['id']}/steps/{{step}}/trace"
        answer = await api.client.get(shown["trace_url"].replace("{step}", "12"))
        trace_id = hashlib.sha256(f"{submitted['id']}/12".encode()).hexdigest()[:32]
        assert (answer.status_code, answer.headers["location"]) == (307, ui.replace("{trace_id}", trace_id))


async def test_without_an_address_there_is_no_way(settings: ControllerSettings, job: Job) -> None:
    async with serve(settings) as api:
        submitted = await api.submit(job())
        assert (await api.client.get(f"/v1/jobs/{submitted['id']}")).json()["trace_url"] == ""
        answer = await api.client.get(f"/v1/jobs/{submitted['id']}/steps/0/trace")
        assert (answer.status_code, answer.json()["detail"]) == (
            404,
            "this controller has no address of traces: set FLOWFLEET_TRACE_URL",
        )
