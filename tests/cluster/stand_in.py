"""A release without its services: owner, trainer template and Service, and pods that only seem to train."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from flowfleet.errors import Unavailable
from flowfleet.job.spec import JobSpec, parse_job
from services.controller.platforms.kubernetes.directory import KubernetesDirectory
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.waiting import NotYet
from tests.cluster.conftest import Cluster

PREFIX, TAG = os.environ.get("PREFIX", "localhost/"), os.environ.get("TAG", "0.1.0")
IMAGE = f"{PREFIX}flowfleet-controller:{TAG}"
PYTHON = "/opt/flowfleet/bin/python"
RELEASE = "ff"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
TINY = {"requests": {"cpu": "10m", "memory": "32Mi"}}


def _seem_to_train() -> None:
    """The program of a stand-in: rank 0 serves health; each ends as /tmp/exit says, with a code and words,
    once that is written."""
    import asyncio
    import pathlib
    import sys

    from flowfleet.rpc import endpoint as rpc

    code = pathlib.Path("/tmp/exit")

    def end_as_told() -> None:
        if code.exists():
            number, _, words = code.read_text().partition(" ")
            pathlib.Path("/dev/termination-log").write_text(words or "the rank fails on request")
            sys.exit(int(number))

    async def main() -> None:
        stop = asyncio.Event()
        server = asyncio.create_task(
            rpc.serve(rpc.make_server(), host="0.0.0.0", port=7000, health=rpc.HealthState("x"), stop=stop, grace_s=0)
        )
        while not server.done():
            end_as_told()
            await asyncio.sleep(0.05)

    print(sys.argv[1:], flush=True)
    asyncio.run(main())


PROGRAM = f"{inspect.getsource(_seem_to_train)}\n_seem_to_train()"


def container(name: str, **parts: Any) -> dict[str, Any]:
    made = {"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent", "resources": TINY}
    return {**made, "securityContext": RESTRICTED, **parts}


def idle(name: str, **limits: str) -> dict[str, Any]:
    """A container that does nothing."""
    resources = {"requests": {"cpu": "1m", "memory": "4Mi"}, "limits": limits}
    return container(name, command=["sleep", "infinity"], resources=resources)


def trainer_template(*, ranks_per_pod: int = 1, accelerator: str = "", queue: str = "") -> dict[str, Any]:
    """The chart's template with another program."""
    env = [
        {"name": "FLOWFLEET_RPC_TOKEN", "value": "0123456789abcdef"},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    labels = {"app.kubernetes.io/name": "flowfleet", "app.kubernetes.io/instance": RELEASE}
    labels |= {"app.kubernetes.io/component": "trainer"}
    pod = {
        "subdomain": f"{RELEASE}-trainer",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": False,
        "containers": [container("trainer", command=[PYTHON, "-c", PROGRAM], env=env)],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{RELEASE}-trainer",
            "labels": {**labels, **({"kueue.x-k8s.io/queue-name": queue} if queue else {})},
            "annotations": {
                "flowfleet.io/ranks-per-pod": str(ranks_per_pod),
                "flowfleet.io/accelerator": accelerator,
                "flowfleet.io/drain-s": "1",
            },
        },
        "spec": {
            "completionMode": "Indexed",
            "backoffLimit": 0,
            **({"suspend": True} if queue else {}),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def owner() -> dict[str, Any]:
    """The controller's Deployment, without pods."""
    labels = {"app": "owner"}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container("controller")]}}
    metadata = {"name": f"{RELEASE}-controller"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {**spec, "template": template}}


def job_of(ranks: int, **trainer: Any) -> JobSpec:
    job = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
    return parse_job({**job, "trainer": {"world_size": ranks, **trainer}})


@dataclass
class Release:
    """A launcher in this process, as a controller has it, and ways to look at and to disturb what it launched."""

    cluster: Cluster
    directory: KubernetesDirectory
    launcher: KubernetesLauncher
    template: Path
    job_id: str

    def use(self, template: dict[str, Any]) -> None:
        self.template.write_text(json.dumps(template))

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.cluster.kubectl, *arguments, stdin=stdin)

    async def get(self, *arguments: str) -> Any:
        return await asyncio.to_thread(self.cluster.get, *arguments)

    async def pod(self, index: int) -> str:
        """Name of the newest attempt's pod of this index."""
        selector = f"flowfleet.io/job={self.job_id},batch.kubernetes.io/job-completion-index={index}"
        found = await self.get("pods", "--selector", selector)
        return str(max(found, key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"])

    async def served(self, spec: JobSpec, timeout_s: float = 60.0) -> str:
        """Asks until the trainer serves, as the state machine does."""
        reasons: list[str] = []
        begun = time.monotonic()
        while time.monotonic() - begun < timeout_s:
            try:
                return await self.launcher.ensure(self.job_id, spec)
            except (NotYet, Unavailable) as waits:
                reasons.append(str(waits))
            await asyncio.sleep(0.2)
        raise AssertionError(f"no trainer after {timeout_s} s: {reasons[-3:]}")

    async def waits(self, spec: JobSpec, reason: str, timeout_s: float = 30.0) -> None:
        """Asks until it must wait for this reason."""
        begun, last = time.monotonic(), ""
        while time.monotonic() - begun < timeout_s:
            try:
                await self.launcher.ensure(self.job_id, spec)
            except NotYet as waits:
                last = str(waits)
            if reason in last:
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"no {reason!r}, but {last!r}")


@asynccontextmanager
async def release(cluster: Cluster, folder: Path, template: dict[str, Any] | None = None) -> AsyncIterator[Release]:
    """Made in the namespace of the test."""
    labels = {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/component": "trainer"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": [{"port": 7000}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{RELEASE}-trainer"}, "spec": spec}
    await asyncio.to_thread(cluster.apply, owner(), service)
    path = folder / "trainer.yaml"
    path.write_text(json.dumps(template or trainer_template()))
    async with directory_of(cluster) as directory:
        launcher = KubernetesLauncher(directory, RELEASE, cluster.namespace, path, f"{RELEASE}-controller")
        job_id = f"0190a0b0-0000-7000-8000-{uuid.uuid4().hex[:12]}"
        yield Release(cluster, directory, launcher, path, job_id)


@asynccontextmanager
async def directory_of(
    cluster: Cluster, release: str = RELEASE, registry: CollectorRegistry | None = None
) -> AsyncIterator[KubernetesDirectory]:
    directory = KubernetesDirectory(release, cluster.namespace, registry or CollectorRegistry())
    await directory.start()
    try:
        yield directory
    finally:
        await directory.stop()
