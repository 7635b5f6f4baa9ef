"""What the launcher makes of an API server that refuses a trainer's Job, and how long it waits for pods to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowfleet.errors import Unavailable
from flowfleet.jobs import parse_job
from services.controller import kubernetes_launcher
from services.controller.kubernetes_api import JOBS, PODS, Refused
from services.controller.kubernetes_api import _problem as problem
from services.controller.kubernetes_launcher import KubernetesLauncher
from services.controller.kubernetes_mirror import Mirror
from services.controller.waiting import WaitedInVain

SPEC = parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


class RefusingApi:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def list(self, *_: Any) -> Any:
        raise self.error

    async def delete(self, *_: Any) -> None:
        return


class Directory:
    def __init__(self, api: Any) -> None:
        self.api, self.jobs, self.pods = api, Mirror(api, JOBS, ""), Mirror(api, PODS, "")


def ensure(error: Exception) -> None:
    launcher = KubernetesLauncher(Directory(RefusingApi(error)), "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    asyncio.run(launcher.ensure("job", SPEC))


@pytest.mark.parametrize("status", [401, 403, 429])
def test_what_people_can_grant_is_waited_for_with_the_servers_words(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_launcher, "REFUSED_S", 0.01)
    error = problem(JOBS, status, b'{"message": "exceeded quota: none"}')
    assert isinstance(error, Unavailable if status == 429 else Refused)
    with pytest.raises(WaitedInVain, match=r"trainer: the Kubernetes API.*: exceeded quota: none"):
        ensure(error)


@pytest.mark.parametrize("status", [400, 422])
def test_a_job_that_can_never_be_one_is_the_jobs_failure(status: int) -> None:
    with pytest.raises(ValueError, match=rf"refuses \({status}, jobs\): spec.template: no"):
        ensure(problem(JOBS, status, b'{"message": "spec.template: no"}'))


@pytest.mark.parametrize(("pod", "grace_s"), [({"terminationGracePeriodSeconds": 300}, 300.0), ({}, 30.0)])
def test_pods_get_their_grace_period_to_end(
    pod: dict[str, Any], grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(RefusingApi(RuntimeError()))
    labels = {"flowfleet.io/job": "job"}
    metadata = {"name": "t", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    directory.jobs.put({"metadata": metadata, "spec": {"template": {"spec": pod}}})
    waited = []

    async def until(_: Any, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    monkeypatch.setattr(directory.jobs, "until", until)
    asyncio.run(KubernetesLauncher(directory, "f", "n", Path("none"), "o").stop("job"))  # type: ignore[arg-type]
    assert waited == [grace_s + kubernetes_launcher.STOP_MARGIN_S]
