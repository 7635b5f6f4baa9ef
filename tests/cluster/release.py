"""A release of the chart under test: installed, changed, looked at, reached by REST, and volumes for it."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.api.jobs import Job
from flowfleet.client import Client
from tests.cluster.conftest import CHART, Cluster, run

PREFIX, TAG = os.environ.get("PREFIX", "localhost/"), os.environ.get("TAG", "0.1.0")
VOLUMES = Path("/var/tmp")
COMPONENTS = ("controller", "rollout", "reward", "redis", "trainer")


class Log:
    """Prints what happened and when, past pytest's capture."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._started = time.monotonic()
        self._capture = capture

    def __call__(self, text: str) -> None:
        with self._capture.disabled():
            print(f"\n[{time.monotonic() - self._started:6.1f} s] {text}", end="", flush=True)


class Release:
    """The CPU profile with the images under test. `more` are further arguments of helm."""

    def __init__(self, cluster: Cluster, name: str, log: Log, more: Sequence[str]) -> None:
        self.cluster, self.name, self.log = cluster, name, log
        self._set = [
            *("--values", str(CHART / "values-cpu.yaml")),
            *("--set", f"images.registry={PREFIX.rstrip('/')},images.tag={TAG}"),
            *("--set", f"images.redis={PREFIX}flowfleet-redis:{TAG}"),
            *more,
        ]

    # -- changing ----------------------------------------------------------------------------------------------

    def helm(self, verb: str, *more: str) -> None:
        """install or upgrade, until all is ready."""
        self.cluster.helm(verb, self.name, str(CHART), *self._set, *more, "--wait", "--timeout", "4m")

    def delete_a_pod(self, component: str, *flags: str, index: int = 0) -> str:
        """Deletes the pod of this place in the list without waiting for its end; returns its name."""
        name = str(self.pods(component)[index]["metadata"]["name"])
        self.cluster.kubectl("delete", "pod", name, "--wait=false", *flags)
        self.log(f"deleted {name}")
        return name

    # -- looking -----------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """What is needed to understand a failure."""
        for command in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
            self.log(self.cluster.kubectl(*command)[-6000:])
        for component in ("controller", "trainer", "rollout", "reward"):
            selector = f"app.kubernetes.io/component={component}"
            self.log(f"{component}:\n" + self.cluster.kubectl("logs", "-l", selector, "--tail=40", "--prefix"))

    def pods(self, component: str, *, ended: bool = False) -> list[dict[str, Any]]:
        """Pods that are not being deleted. `ended`: of trainers that have done their work, which stay for a while; else
        all others."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        pods: list[dict[str, Any]] = self.cluster.get("pods", "--selector", selector)
        stay = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in stay if (pod["status"]["phase"] == "Succeeded") == ended]

    def names(self, *components: str) -> set[str]:
        return {pod["metadata"]["name"] for component in components for pod in self.pods(component)}

    def templates(self) -> dict[str, Any]:
        """Templates of pods, by workload."""
        workloads = self.cluster.get(
            "deployments,statefulsets", "--selector", f"app.kubernetes.io/instance={self.name}"
        )
        return {workload["metadata"]["name"]: workload["spec"]["template"] for workload in workloads}

    def pods_told(self) -> str:
        return ", ".join(f"{len(self.pods(name))} {name}" for name in COMPONENTS)

    def left(self) -> str:
        kinds = "all,configmaps,secrets,pvc,roles,rolebindings,serviceaccounts,networkpolicies,pdb,scaledobjects"
        ours = f"app.kubernetes.io/instance={self.name}"
        return self.cluster.kubectl("get", kinds, "--output", "name", "--selector", ours).strip()

    # -- waiting -----------------------------------------------------------------------------------------------

    def reach(self, client: Client, job: Job, step: int) -> None:
        """Waits until a step begins. Fails with the reason of a job that ends before."""

        def there() -> bool:
            now = client.job(job.id)
            assert not now.ended, f"{now.status}: {now.reason}"
            return now.progress.step >= step and now.progress.phase == "rollout"

        self.wait(f"step {step}", there, 240)
        self.log(f"step {step}")

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.3)

    @property
    def api_key(self) -> str:
        """Reads the key from the release's Secret."""
        secret = self.cluster.get("secret", f"{self.name}-flowfleet-secrets")
        return base64.b64decode(secret["data"]["api-key"]).decode()

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Opens a client by a port-forward to the Service, renewed when its pod goes."""
        port = _free_port()
        forward = (
            f"while :; do kubectl --namespace {self.cluster.namespace} port-forward "
            f"service/{self.name}-flowfleet-controller {port}:8470; sleep 0.3; done"
        )
        process = subprocess.Popen(
            ["bash", "-c", forward], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            self.wait("the REST API", lambda: _answers(url), 30)
            with Client(url, self.api_key) as client:
                yield client
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def storage(cluster: Cluster, volumes: int = 2) -> Iterator[list[str]]:
    """Settings for volumes; where the cluster makes none by itself, its node is taken for this machine: folders."""
    classes = run("kubectl", "get", "storageclass", "--output", "jsonpath={.items[*].metadata.annotations}")
    if re.search(r'is-default-class"?:\s*"?true', classes):
        yield []
        return
    made = cluster.namespace
    names = [f"{made}-{index}" for index in range(volumes)]
    for name in names:
        (VOLUMES / name).mkdir()
        (VOLUMES / name).chmod(0o777)  # hostPath volumes are not given to a pod's group
    cluster.apply(*(_volume(name) for name in names))
    try:
        yield ["--set", f"state.storageClass={made},redis.persistence.storageClass={made}"]
    finally:
        run("kubectl", "delete", "persistentvolume", *names, "--wait=false", "--ignore-not-found")
        for name in names:
            shutil.rmtree(VOLUMES / name)


def _volume(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": name.rpartition("-")[0],
            "hostPath": {"path": str(VOLUMES / name), "type": "Directory"},
        },
    }


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
