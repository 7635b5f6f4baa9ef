"""KEDA's operator scales Deployments by what a controller's scaler tells it: from zero, with the work, and back.

The controller is a process on this machine, whose trainer, rollout and reward are scripted; what is scaled are pods
that only sleep. So every number of replicas comes from the real runner, scaler, operator and autoscaler.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis

from flowfleet.proto import externalscaler_pb2 as pb
from flowfleet.proto import externalscaler_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect_sync
from tests.cluster.conftest import Cluster, run
from tests.cluster.scripted_controller import GENERATES, REPLICA
from tests.flowfleet.idle_controller import job_settings

pytestmark = pytest.mark.long

KEY = "a-key-of-this-test"
POLL_S, COOLDOWN_S = 5, 10
MOST = 3
RESTRICTED: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def deployment(name: str) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "sleeper", "image": "localhost/pause:1", "securityContext": RESTRICTED}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def scaled_object(name: str, address: str, component: str, of: str) -> dict[str, Any]:
    metadata = {"scalerAddress": address, "component": component, "name": of}
    at_once = {"policies": [{"type": "Pods", "value": 10, "periodSeconds": 15}], "stabilizationWindowSeconds": 0}
    spec = {
        "scaleTargetRef": {"name": name},
        "minReplicaCount": 0,
        "maxReplicaCount": MOST,
        "pollingInterval": POLL_S,
        "cooldownPeriod": COOLDOWN_S,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": at_once}}},
        "triggers": [{"type": "external-push", "metadata": metadata}],
    }
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": spec}


class Controller:
    """A process that can be killed and started again on the same ports."""

    def __init__(self, redis_url: str, folder: Path, host: str) -> None:
        self._env = {**os.environ, "FLOWFLEET_REDIS_URL": redis_url, "FLOWFLEET_API_KEY": KEY}
        self._host, self._folder = host, folder
        self._port, self.scaler = free_port(host), f"{host}:{free_port(host)}"
        self._client = httpx.Client(base_url=f"http://{host}:{self._port}", headers={"X-API-Key": KEY}, timeout=20)
        self.start()

    def start(self) -> None:
        port = self.scaler.rpartition(":")[2]
        flags = ["--host", self._host, "--port", str(self._port), "--scaler-port", port, "--reward", "ocr=127.0.0.1:1"]
        flags += ["--state-dir", str(self._folder / "state"), "--data-root", str(self._folder)]
        command = [sys.executable, "-m", "tests.cluster.scripted_controller", *flags]
        with (self._folder / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self._env, stderr=log)
        until(self._serves, 60)

    def _serves(self) -> bool:
        assert self.process.poll() is None, (self._folder / "controller.log").read_text()
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def submit(self, job: dict[str, Any]) -> str:
        answer = self._client.post("/v1/jobs", json=job)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def status(self, job_id: str) -> str:
        return str(self._client.get(f"/v1/jobs/{job_id}").json()["status"])


@pytest.fixture
def host(cluster: Cluster) -> str:
    """This machine as the cluster sees it."""
    if not run("kubectl", "get", "crd", "--output", "name").count("scaledobjects.keda.sh"):
        pytest.skip("the cluster has no KEDA")
    (address, *_) = run(
        "kubectl", "get", "nodes", "--output", "jsonpath={.items[0].status.addresses[?(@.type=='InternalIP')].address}"
    ).split()
    try:
        free_port(address)
    except OSError:
        pytest.skip(
            f"the cluster is on another machine ({address}), so that KEDA cannot reach a controller on this one"
        )
    return address


@pytest.fixture
def controller(redis_url: str, tmp_path: Path, host: str) -> Iterator[Controller]:
    made = Controller(redis_url, tmp_path, host)
    yield made
    made.end()


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(poll_s)
    return time.monotonic() - began


def replicas(cluster: Cluster, name: str) -> int:
    return int(cluster.get("deployment", name)["spec"]["replicas"])


def running(cluster: Cluster, name: str) -> bool:
    return bool(cluster.get("deployment", name)["status"].get("readyReplicas"))


def ready(cluster: Cluster, name: str) -> bool:
    conditions = cluster.get("scaledobject", name).get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextmanager
def pushed(scaler: str) -> Iterator[Callable[[], None]]:
    """Listens as KEDA does; what it gives returns when the pool's activity changes."""
    ref = pb.ScaledObjectRef(scalerMetadata={"component": "rollout", "name": "default"})
    with grpc.insecure_channel(scaler) as channel:
        answers = externalscaler_pb2_grpc.ExternalScalerStub(channel).StreamIsActive(ref, timeout=60)
        assert not next(answers).result

        def push() -> None:
            next(answers)

        yield push


@contextmanager
def never_zero(cluster: Cluster, *names: str, seconds: float) -> Iterator[None]:
    """What happens inside, and for so many seconds after it, leaves every Deployment a replica."""
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert {name: replicas(cluster, name) for name in names if not replicas(cluster, name)} == {}
        time.sleep(0.5)


@pytest.mark.timeout(600)
def test_replicas_follow_the_work(
    cluster: Cluster, controller: Controller, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures: dict[str, float] = {}
    names = ("pool", "ocr")
    client: redis.Redis = connect_sync(redis_url)
    cluster.apply(*(deployment(name) for name in names))
    cluster.apply(
        scaled_object("pool", controller.scaler, "rollout", "default"),
        scaled_object("ocr", controller.scaler, "reward", "ocr"),
    )
    until(lambda: all(ready(cluster, name) for name in names), 60)
    time.sleep(POLL_S + 2)
    assert [replicas(cluster, name) for name in names] == [0, 0]

    # zero → one on the first job, before anything of it could start; KEDA's poll would take up to 5 s
    rollout = {"prompts_per_step": 16, "group_size": 6, "batch_size": 12}
    with pushed(controller.scaler) as push:
        began = time.monotonic()
        job = controller.submit(job_settings(tmp_path, rollout=rollout, schedule={"steps": 1}))
        push()
        figures["submit to push"] = time.monotonic() - began
    until(lambda: all(replicas(cluster, name) for name in names), 30)
    figures["submit to replicas: 1"] = time.monotonic() - began
    until(lambda: all(running(cluster, name) for name in names), 60)
    figures["submit to a running pod"] = time.monotonic() - began
    assert [replicas(cluster, name) for name in names] == [1, 1]

    # up with the work that waits: 96 samples over 24 a replica, and no more than the ScaledObject allows
    client.set(REPLICA, 1)
    figures["work to more replicas"] = until(lambda: replicas(cluster, "pool") == MOST, 90)
    assert json.loads(client.hget(keys.demand(), "rollout/default") or b"{}")["replicas"] == 96 / 24

    # what is not demand changes nothing: trimmed streams, an emptied hash, a scaler that does not answer
    with never_zero(cluster, *names, seconds=2 * POLL_S + COOLDOWN_S):
        client.xtrim(keys.trajectories(job), maxlen=0)
        client.delete(keys.demand())
    with never_zero(cluster, *names, seconds=3 * POLL_S + COOLDOWN_S):
        controller.end()
    assert replicas(cluster, "pool") == MOST
    controller.start()

    # down when idle
    client.set(GENERATES, 1)
    until(lambda: controller.status(job) == "succeeded", 60)
    figures["end of the job to zero"] = until(lambda: not any(replicas(cluster, name) for name in names), 120)
    controller.end(signal.SIGTERM)
    with capsys.disabled():
        print("\n" + "\n".join(f"{what}: {seconds:.2f} s" for what, seconds in figures.items()))
    assert figures["submit to push"] < 1.0
    assert figures["submit to replicas: 1"] < POLL_S
