"""What the launcher makes of an API server that refuses a trainer's Job, and how long it waits for pods to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowfleet.errors import Conflict, Unavailable
from flowfleet.job.spec import parse_job
from flowfleet.rpc import kinds
from services.controller.platforms.kubernetes import launcher as kubernetes_launcher
from services.controller.platforms.kubernetes.api import JOBS, PODS, Refused
from services.controller.platforms.kubernetes.api import _problem as problem
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.platforms.kubernetes.mirror import Mirror
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


async def ensure(error: Exception) -> None:
    launcher = KubernetesLauncher(Directory(RefusingApi(error)), "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    await launcher.ensure("job", SPEC)


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_what_people_can_grant_is_waited_for_with_the_servers_words(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_launcher, "REFUSED_S", 0.01)
    error = problem(JOBS, status, b'{"message": "exceeded quota: none"}')
    assert isinstance(error, Unavailable if status == 429 else Refused)
    with pytest.raises(WaitedInVain, match=r"trainer: the Kubernetes API.*: exceeded quota: none"):
        await ensure(error)


async def test_an_attempt_has_a_secret_that_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, also by a controller that found it there."""
    made: list[Any] = []

    class ExistingApi:
        async def create(self, resource: Any, body: Any) -> Any:
            made.append((resource.plural, body))
            raise Conflict("there is one")

    monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", "t")
    launcher = KubernetesLauncher(Directory(ExistingApi()), "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    attempt = {"metadata": {"name": "t-1", "uid": "u", "labels": {"flowfleet.io/job": "job"}}}
    for _ in range(2):
        await launcher._give(attempt)
    ((plural, body),) = made
    assert plural == "secrets"
    assert body["metadata"]["ownerReferences"] == [{"apiVersion": "batch/v1", "kind": "Job", "name": "t-1", "uid": "u"}]
    assert body["stringData"].keys() == kinds.job_secrets("job").keys()


@pytest.mark.parametrize("status", [400, 422])
async def test_a_job_that_can_never_be_one_is_the_jobs_failure(status: int) -> None:
    with pytest.raises(ValueError, match=rf"refuses \({status}, jobs\): spec.template: no"):
        await ensure(problem(JOBS, status, b'{"message": "spec.template: no"}'))


@pytest.mark.parametrize(("pod", "grace_s"), [({"terminationGracePeriodSeconds": 300}, 300.0), ({}, 30.0)])
async def test_pods_get_their_grace_period_to_end(
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
    await KubernetesLauncher(directory, "f", "n", Path("none"), "o").stop("job")  # type: ignore[arg-type]
    assert waited == [grace_s + kubernetes_launcher.STOP_MARGIN_S]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_trainer_that_hangs_gets_no_grace_period(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[tuple[str, int | None]] = []

    class DeletingApi:
        async def delete(self, resource: Any, name: str, *, grace_s: int | None = None) -> None:
            deleted.append((name, grace_s))

    class WithPods(Directory):
        def pods_of(self, component: str, job_id: str) -> list[Any]:
            return [{"metadata": {"name": "t-0", "ownerReferences": [{"uid": "u"}]}}]

    directory = WithPods(DeletingApi())
    labels = {"flowfleet.io/job": "job"}
    metadata = {"name": "t", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    directory.jobs.put({"metadata": metadata, "spec": {"template": {"spec": {}}}})
    monkeypatch.setattr(kubernetes_launcher, "STOP_MARGIN_S", -30.0)
    launcher = KubernetesLauncher(directory, "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    await launcher.stop("job", at_once=at_once)
    assert deleted == [*([("t-0", 1)] if at_once else []), ("t", None)]


async def test_the_termination_message_is_those_of_the_rank_that_failed_not_of_the_first_pod_that_is_told_of() -> None:
    def pod(index: int, **status: Any) -> dict[str, Any]:
        place = {"batch.kubernetes.io/job-completion-index": str(index)}
        return {"metadata": {"name": f"t-{index}", "annotations": place}, "status": status}

    def failed(index: int, message: str) -> dict[str, Any]:
        end = {"exitCode": 1, "finishedAt": "2026-01-01T00:00:10Z", "message": message}
        return pod(index, phase="Failed", containerStatuses=[{"name": "trainer", "state": {"terminated": end}}])

    class WithPods(Directory):
        def pods_of(self, component: str, job_id: str) -> list[Any]:
            owner = {"ownerReferences": [{"uid": "u"}]}
            return [{**seen, "metadata": {**seen["metadata"], **owner}} for seen in self.pods.objects.values()]

    directory = WithPods(RefusingApi(RuntimeError()))
    labels = {"flowfleet.io/job": "job"}
    metadata = {"name": "t", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    directory.jobs.put({"metadata": metadata, "spec": {}})
    directory.pods.put(failed(0, "RuntimeError: Gloo connectFullMesh failed: Connection refused"))
    directory.pods.put(pod(1, phase="Running", containerStatuses=[{"name": "trainer", "state": {"running": {}}}]))
    launcher = KubernetesLauncher(directory, "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    asked = asyncio.create_task(launcher.termination_message("job"))
    await asyncio.sleep(0.05)
    assert not asked.done()
    del directory.pods.objects["t-1"]
    directory.pods.put(failed(1, "rank 1: ValueError: the noise has 3 steps"))
    assert (await asked) == "pod 1: exit code 1: rank 1: ValueError: the noise has 3 steps"


async def test_a_trainer_that_ends_by_itself_is_left_with_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Job is neither waited for, deleted, nor taken for one that lives."""
    deleted: list[str] = []

    class DeletingApi:
        async def delete(self, resource: Any, name: str, *, grace_s: int | None = None) -> None:
            deleted.append(name)

    directory = Directory(DeletingApi())
    metadata = {
        "name": "t",
        "uid": "u",
        "labels": {"flowfleet.io/job": "job"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    attempt = {"metadata": metadata, "spec": {"template": {"spec": {}}}}
    launcher = KubernetesLauncher(directory, "f", "n", Path("none"), "o")  # type: ignore[arg-type]
    directory.jobs.put(attempt)
    waiting = asyncio.create_task(launcher.ended("job"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    directory.jobs.objects["t"] = {**attempt, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    directory.jobs._tell()
    await asyncio.wait_for(waiting, 5)
    await launcher.stop("job")
    await launcher.keep_only([])
    assert not await launcher.alive("job")
    assert deleted == []
