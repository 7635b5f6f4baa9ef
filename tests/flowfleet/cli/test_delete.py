"""Deletes many jobs, some of which cannot go."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfleet.api.problems import ApiError
from flowfleet.cli import main as cli
from flowfleet.client.client import Client
from tests.flowfleet.cli.samples.test_page import JOB


@pytest.mark.parametrize(
    ("last", "tried"), [(ApiError(409, "its files are in use"), 5), (ApiError(503, "no controller"), 2)]
)
def test_delete_before_tries_every_job_and_tells_what_failed(
    monkeypatch: pytest.MonkeyPatch, last: Exception, tried: int
) -> None:
    now = datetime.now(UTC)
    jobs = [JOB.model_copy(update={"id": str(number), "ended_at": now}) for number in range(5)]
    answers: list[Any] = [jobs[0], last, ApiError(410, "1"), ApiError(404, "2"), jobs[4]]
    asked: list[str] = []

    def delete(_: Client, job_id: str, *, files: bool) -> Any:
        asked.append(job_id)
        if isinstance(answer := answers[int(job_id)], Exception):
            raise answer
        return answer

    monkeypatch.setattr(Client, "jobs", lambda _: iter(jobs))
    monkeypatch.setattr(Client, "delete", delete)
    done = CliRunner().invoke(cli.app, ["delete", "--before", "2900-01-01", "--url", "http://127.0.0.1:1", "--json"])
    assert (done.exit_code, len(asked)) == (1, tried)
    assert [job["id"] for job in json.loads(done.stdout)] == (["0", "4"] if tried == 5 else ["0"])
    assert f"job 1: {last}" in done.stderr
    assert ("3 more jobs were not tried" in done.stderr) == (tried == 2)
