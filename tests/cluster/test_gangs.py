"""Gangs of pods on a real cluster: jobs that each want two of three places finish, without Kueue and under it, and no
pod that runs waits for others beyond the limit. The real launcher and the real scheduler of jobs; pods only sleep."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from flowfleet.api.jobs import JobStatus
from flowfleet.job.spec import RolloutPart
from flowfleet.redis.client import connect
from services.controller.jobs import returned
from services.controller.jobs.scheduler import JobScheduler
from services.controller.platforms.kubernetes import placement
from services.controller.platforms.kubernetes.directory import KubernetesDirectory
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.settings import ControllerSettings
from services.controller.store.records import NO_PLACE, JobRecord
from services.controller.store.store import Store
from services.controller.waiting import NotYet
from tests.cluster.conftest import Cluster, run
from tests.cluster.stand_in import RELEASE, directory_of, job_of, owner, trainer_template
from tests.waiting import until

SLOTS = 3
LIMIT_S = 6.0
TRAINS_S = 10.0
RESOURCE = "example.com/gang"
QUEUE = "gangs"


@pytest.fixture
def slots() -> Iterator[None]:
    """Lends three pretend accelerators to a node."""
    [first, *_] = run("kubectl", "get", "nodes", "--output", "name").split()
    paths = [f"/status/{part}/{RESOURCE.replace('/', '~1')}" for part in ("capacity", "allocatable")]
    lend = [{"op": "add", "path": path, "value": str(SLOTS)} for path in paths]
    patch = ("kubectl", "patch", first, "--subresource=status", "--type=json", "--patch")
    run(*patch, json.dumps(lend))
    try:
        yield
    finally:
        run(*patch, json.dumps([{"op": "remove", "path": path} for path in paths]))


def template(queue: str = "") -> dict[str, Any]:
    """Pods of the sandbox's own image, which sleep."""
    made = trainer_template(ranks_per_pod=1, accelerator=RESOURCE, queue=queue)
    made["metadata"]["annotations"]["flowfleet.io/placement-s"] = f"{LIMIT_S:.0f}"
    trainer = made["spec"]["template"]["spec"]["containers"][0]
    trainer |= {"image": os.environ.get("PAUSE", "localhost/pause:1"), "imagePullPolicy": "Never"}
    del trainer["command"]
    return made


class Gangs(JobScheduler):
    """Holds the trainer of each job for a while once all its pods run."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._runner._drive = self._drive  # type: ignore[method-assign]

    async def _drive(self, record: JobRecord) -> None:
        while True:
            try:
                await self._launcher.ensure(record.id, record.job_spec())
                break
            except NotYet as waits:
                await self._store.jobs.set_status(record.id, JobStatus.STARTING, str(waits))
                await asyncio.sleep(0.2)
        await self._store.jobs.set_status(record.id, JobStatus.RUNNING)
        await asyncio.sleep(TRAINS_S)
        await self._launcher.stop(record.id)
        await self._store.jobs.set_status(record.id, JobStatus.SUCCEEDED)


@asynccontextmanager
async def gangs(cluster: Cluster, url: str, folder: Path, queue: str = "") -> AsyncIterator[tuple[Gangs, Store, Any]]:
    await asyncio.to_thread(cluster.apply, owner())
    path = folder / "trainer.yaml"
    path.write_text(json.dumps(template(queue)))
    redis = connect(url)
    store = Store(redis)
    settings = ControllerSettings(redis_url=SecretStr(url), state_dir=folder)
    async with directory_of(cluster) as directory:
        launcher = KubernetesLauncher(directory, RELEASE, cluster.namespace, path, f"{RELEASE}-controller")

        async def serves(attempt: Any) -> bool:
            own = directory.pods_of("trainer", attempt["metadata"]["labels"]["flowfleet.io/job"])
            return placement.is_placed(attempt, own) and all(pod["status"].get("phase") == "Running" for pod in own)

        launcher._serves = serves  # type: ignore[method-assign]
        runner = Gangs(settings, redis, store, CollectorRegistry(), launcher, directory)
        try:
            yield runner, store, directory
        finally:
            await runner.stop()
            await redis.aclose()


def longest_wait_s(directory: KubernetesDirectory) -> float:
    """Seconds for which a Running pod has waited for others of its gang by now."""
    longest = 0.0
    for job in directory.jobs.objects.values():
        own = directory.pods_of("trainer", job["metadata"]["labels"]["flowfleet.io/job"])
        left = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
        if placement.is_placed(job, left) or "deletionTimestamp" in job["metadata"]:
            continue
        for pod in left:
            if pod["status"].get("phase") == "Running":
                begun = datetime.fromisoformat(pod["status"]["startTime"])
                longest = max(longest, (datetime.now(UTC) - begun).total_seconds())
    return longest


async def both_finish(cluster: Cluster, url: str, folder: Path, queue: str = "") -> tuple[set[str], float]:
    """Submits two jobs of two pods, each for a pool of its own, in a random order and distance. Returns the reasons
    that they showed, and the longest wait of a Running pod for its gang."""
    reasons: set[str] = set()
    longest, draw = 0.0, random.Random()
    async with gangs(cluster, url, folder, queue) as (runner, store, directory):
        await runner.start()
        jobs = []
        for pool in draw.sample(("default", "wide"), 2):
            spec = job_of(2).model_copy(update={"rollout": RolloutPart(pool=pool)})
            jobs.append((await store.jobs.create(spec))[0].id)
            await runner.notify()
            await asyncio.sleep(draw.uniform(0.0, 1.0))
        begun = time.monotonic()
        while len([job for job in jobs if (await store.jobs.get(job)).status is JobStatus.SUCCEEDED]) < 2:
            assert time.monotonic() - begun < 150, reasons
            reasons |= {(await store.jobs.get(job)).reason for job in jobs}
            longest = max(longest, longest_wait_s(directory))
            await asyncio.sleep(0.2)
        print(f"both finished after {time.monotonic() - begun:.0f} s, longest wait of a pod {longest:.1f} s")
        await until(lambda: not directory.jobs.objects, 30)
    return reasons, longest


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returned, "FIRST_S", 4.0)
    monkeypatch.setattr(returned, "LONGEST_S", 8.0)


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize("number", range(3))
async def test_two_jobs_that_want_two_of_three_places_finish(
    number: int, cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    reasons, longest = await both_finish(cluster, redis_url, tmp_path)
    assert longest <= LIMIT_S + 3.0, "a look, and seconds of the API server's clock"
    assert any(reason.startswith(f"{NO_PLACE} within 6 s: ") and RESOURCE in reason for reason in reasons), reasons


KUEUE = "kueue.x-k8s.io"


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[str]:
    """Kueue's queues, with a quota of three accelerators. Skips without Kueue."""
    if f"workloads.{KUEUE}" not in run("kubectl", "get", "crds", "--output", "name"):
        pytest.skip("the cluster has no Kueue")
    name = f"{QUEUE}-{uuid.uuid4().hex[:6]}"
    kind = {"apiVersion": f"{KUEUE}/v1beta1"}
    quota = [{"name": name, "resources": [{"name": RESOURCE, "nominalQuota": SLOTS}]}]
    group = {"coveredResources": [RESOURCE, "cpu", "memory"], "flavors": quota}
    quota[0]["resources"] = [
        *quota[0]["resources"],
        *({"name": n, "nominalQuota": "1000Gi"} for n in ("cpu", "memory")),
    ]
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    cluster.apply(
        {**kind, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {**kind, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec},
        {**kind, "kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": name}},
        *(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": f"{name}-{kind}"},
                "value": value,
            }
            for kind, value in (("low", 1), ("high", 1000))
        ),
    )
    try:
        yield name
    finally:
        run("kubectl", "delete", "priorityclass", f"{name}-low", f"{name}-high")
        run("kubectl", "delete", "clusterqueue,resourceflavor", name, "--wait=false")


@pytest.mark.usefixtures("slots", "queue")
@pytest.mark.parametrize("number", range(3))
async def test_under_kueue_both_finish_and_no_pod_ever_waits(
    number: int, cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    reasons, longest = await both_finish(cluster, redis_url, tmp_path, QUEUE)
    assert longest <= 3.0, "all pods of a Job or none"
    words = f"trainer: waits in queue {QUEUE}: couldn't assign flavors to pod set main: insufficient unused quota"
    assert any(reason.startswith(words) for reason in reasons), reasons


@pytest.mark.usefixtures("slots")
async def test_a_job_that_kueue_preempts_keeps_its_job_and_runs_again(
    queue: str, cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    """The second job has a higher priority class, which its file names."""
    async with gangs(cluster, redis_url, tmp_path, QUEUE) as (runner, _, directory):
        launcher = runner._launcher._launcher
        made = template(QUEUE)
        made["metadata"]["annotations"]["flowfleet.io/priority-classes"] = f"{queue}-low,{queue}-high"
        (tmp_path / "trainer.yaml").write_text(json.dumps(made))
        low, high = (f"0190a0b0-0000-7000-8000-{uuid.uuid4().hex[:12]}" for _ in range(2))
        specs = {
            job: job_of(2, kubernetes={"priority_class": f"{queue}-{name}"})
            for job, name in ((low, "low"), (high, "high"))
        }

        async def serves(job_id: str) -> bool:
            try:
                return bool(await launcher.ensure(job_id, specs[job_id]))
            except NotYet as waits:
                seen.add(str(waits))
                return False

        seen: set[str] = set()
        await until(lambda: serves(low), 60, 0.3)
        [before] = [name for name, job in directory.jobs.objects.items()]
        await until(lambda: serves(high), 60, 0.3)
        assert not await launcher.alive(low)
        assert not await serves(low)
        assert any(words.startswith(f"trainer: waits in queue {QUEUE}: ") for words in seen), seen
        print(seen)
        await launcher.stop(high)
        await until(lambda: serves(low), 60, 0.3)
        assert list(directory.jobs.objects) == [before], "the same Job, admitted again"
        assert await launcher.alive(low)
        await launcher.stop(low)
