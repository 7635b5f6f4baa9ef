"""The demo inside a cluster: installed by Helm, grown from zero, upgraded, hit, its reward swapped while it trains, and
removed.

Needs the images in the cluster (`make test-cluster` builds and loads them), KEDA for growing from zero, and rights to
make volumes where the cluster has no default StorageClass. The log that it prints has the time of every stage.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.api_types import Job
from flowfleet.client import Client
from flowfleet.jobs import read_job_file
from tests.cluster.conftest import CHART, Cluster, run
from tests.cluster.prometheus import Prometheus

ROOT = CHART.parents[2]
RELEASE = "demo"
PREFIX, TAG = os.environ.get("PREFIX", "localhost/"), os.environ.get("TAG", "0.1.0")
VOLUMES = Path("/var/tmp")
STEPS, SAMPLES_A_STEP = 9, 96
LEARNT = 0.2
"""By how much the held-out reward must rise; `make demo` gives 0.3. The second version of OCR, which scores the last
steps, is the stricter one: of the same pictures its scores are lower."""
SECOND = ROOT / "tests" / "e2e" / "signs_v2.py"
FILES = "/etc/flowfleet/reward"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Log:
    """Prints what happened and when, past pytest's capture."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._started = time.monotonic()
        self._capture = capture

    def __call__(self, text: str) -> None:
        with self._capture.disabled():
            print(f"\n[{time.monotonic() - self._started:6.1f} s] {text}", end="", flush=True)


def test_the_demo_in_the_cluster(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(capsys)
    with _storage(cluster) as storage:
        release = Release(cluster, storage, log)
        try:
            release.install()
            release.train(tmp_path)
        except BaseException:
            release.tell()
            raise
        release.uninstall()


class Release:
    def __init__(self, cluster: Cluster, storage: list[str], log: Log) -> None:
        self.cluster, self.log = cluster, log
        self._set = [
            *("--values", str(CHART / "values-cpu.yaml")),
            *storage,
            *("--set", f"images.registry={PREFIX.rstrip('/')},images.tag={TAG}"),
            *("--set", f"images.redis={PREFIX}flowfleet-redis:{TAG}"),
            *("--set", "keda.enabled=true,rollout.autoscaling.cooldownSeconds=15"),
        ]

    # -- stages ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self._helm("install")
        self.log(f"installed: {self._pods_told()}")
        self.cluster.helm("test", RELEASE, "--logs", "--timeout", "4m")
        self.log("helm test passed")

    def train(self, pictures: Path) -> None:
        cluster, log = self.cluster, self.log
        self._wait("the pool is at zero again", lambda: not self._pods("rollout"), 240)
        with self._client() as client, Prometheus(cluster, RELEASE) as prometheus:
            submitted = time.monotonic()
            job = client.submit(_job())
            log(f"submitted {job.id}; rollout pods: {len(self._pods('rollout'))}")
            self._wait("a rollout pod", lambda: bool(self._pods("rollout")), 60)
            log(f"zero → one: a rollout pod after {time.monotonic() - submitted:.1f} s")
            self._wait("two trainer pods", lambda: len(self._pods("trainer")) == 2, 60)
            self._wait("the first picture", lambda: any(client.samples(job.id, purpose="validate")), 180)
            log(f"first picture after {time.monotonic() - submitted:.1f} s: {self._pods_told()}")

            self._reach(client, job, 2)
            self._upgrade_rewards()
            self._shadow(client, job)
            self._reach(client, job, 4)
            self._delete_a_pod("rollout")
            self._reach(client, job, 5)
            boundary = self._promote(client, job)
            self._delete_a_pod("controller")
            self._reach(client, job, 7)
            prometheus.check_boards()
            log("every panel of every board has data")
            job = client.wait(job.id, 300)
            prometheus.render(Path(os.environ.get("PICTURES", pictures)))
            self._check(client, job, boundary)

    def _check(self, client: Client, job: Job, boundary: int) -> None:
        results = job.results
        assert job.status == "succeeded", job.reason
        assert results["samples_trained"] == STEPS * SAMPLES_A_STEP, results
        assert results["samples_dropped"] == {}, results
        rows = list(client.metrics(job.id))
        assert [row.step for row in rows if "actor/loss" in row.values] == list(range(STEPS))
        versions: dict[int, set[str]] = {}
        for sample in client.samples(job.id):
            versions.setdefault(sample.step, set()).add(sample.versions["ocr"].partition(" (")[0])
        assert versions == {step: {"ocr 1" if step < boundary else "signs v2"} for step in range(STEPS)}
        curve = [row.values["val/reward"] for row in rows if row.values.get("val/reward") is not None]
        told = " → ".join(f"{reward:.3f}" for reward in curve if reward is not None)
        self.log(
            f"{job.status}: held-out OCR {told}; {results['samples_trained']} trained, dropped "
            f"{results['samples_dropped']}, {results['duplicates']} duplicates"
        )
        assert results["held_out_reward"] - (curve[0] or 0.0) > LEARNT
        self._wait("the trainer's pods are gone", lambda: not self._pods("trainer"), 60)

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, "--wait", "--timeout", "3m")
        self._wait("nothing is left", lambda: not self._left(), 90)
        self.log("uninstalled; nothing is left")

    # -- faults ------------------------------------------------------------------------------------------------

    def _upgrade_rewards(self) -> None:
        """Another image for the reward service, and one beside it: no other workload changes, no pod that nothing
        scales goes."""
        pods, templates = self._names("controller", "redis", "trainer"), self._templates()
        first = {"name": "ocr", "scorer": "ocr", "image": f"{PREFIX}flowfleet-reward:{TAG}-next"}
        settings = {"function": "signs_v2:soft", "path": FILES, "name": "signs", "version": "v2", "batch": 24}
        settings["params"] = ["crop", "alphanumeric"]
        second = {
            "name": "ocr-v2",
            "scorer": "python",
            "settings": settings,
            "files": {SECOND.name: SECOND.read_text()},
        }
        self._helm("upgrade", "--set-json", f"rewards={json.dumps([first, second])}")
        found = self._templates()
        assert {name for name in templates if found.get(name) != templates[name]} == {f"{RELEASE}-flowfleet-reward-ocr"}
        assert found.keys() - templates.keys() == {f"{RELEASE}-flowfleet-reward-ocr-v2"}
        assert self._names("controller", "redis", "trainer") == pods
        images = {name: found[f"{RELEASE}-flowfleet-reward-{name}"] for name in ("ocr", "ocr-v2")}
        tags = {name: image["spec"]["containers"][0]["image"].rpartition(":")[2] for name, image in images.items()}
        assert tags == {"ocr": f"{TAG}-next", "ocr-v2": TAG}
        self.log(f"helm upgrade: the reward runs {TAG}-next, ocr-v2 stands beside it, all else stayed")

    def _shadow(self, client: Client, job: Job) -> None:
        params = client.job(job.id).spec["rewards"]["ocr"]["params"]
        shadow = {"ocr2": {"for": "ocr", "service": "ocr-v2", "params": params}}
        revision = client.change_rewards(job.id, shadow=shadow).revision
        self.log(f"ocr-v2 is a shadow from step {client.wait_for_rewards(job.id, revision, 120).active.from_step} on")

    def _promote(self, client: Client, job: Job) -> int:
        """The first step that the second version scores."""

        def compared() -> bool:
            comparison = client.rewards(job.id).comparison
            return "ocr2" in comparison and comparison["ocr2"].train.samples > 0

        self._wait("a comparison", compared, 120)
        seen = client.rewards(job.id).comparison["ocr2"].train
        assert seen.failed == 0
        boundary = client.wait_for_rewards(job.id, client.change_rewards(job.id, promote=["ocr2"]).revision, 120)
        assert boundary.active.from_step is not None
        assert boundary.active.from_step < STEPS
        self.log(
            f"{seen.samples} samples scored by both, rank correlation {seen.spearman}, {seen.failed} failed; "
            f"ocr-v2 is promoted from step {boundary.active.from_step} on"
        )
        return boundary.active.from_step

    def _delete_a_pod(self, component: str) -> None:
        name = self._pods(component)[0]["metadata"]["name"]
        self.cluster.kubectl("delete", "pod", name, "--wait=false")
        self.log(f"deleted {name}")

    # -- looking -----------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """What is needed to understand a failure."""
        for command in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
            self.log(self.cluster.kubectl(*command)[-6000:])
        for component in ("controller", "trainer", "rollout", "reward"):
            selector = f"app.kubernetes.io/component={component}"
            self.log(f"{component}:\n" + self.cluster.kubectl("logs", "-l", selector, "--tail=40", "--prefix"))

    def _helm(self, verb: str, *more: str) -> None:
        self.cluster.helm(verb, RELEASE, str(CHART), *self._set, *more, "--wait", "--timeout", "4m")

    def _pods(self, component: str) -> list[dict[str, Any]]:
        """Those that are not on their way out."""
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"
        pods: list[dict[str, Any]] = self.cluster.get("pods", "--selector", selector)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def _names(self, *components: str) -> set[str]:
        return {pod["metadata"]["name"] for component in components for pod in self._pods(component)}

    def _templates(self) -> dict[str, Any]:
        """Of pods, by workload."""
        workloads = self.cluster.get("deployments,statefulsets", "--selector", f"app.kubernetes.io/instance={RELEASE}")
        return {workload["metadata"]["name"]: workload["spec"]["template"] for workload in workloads}

    def _pods_told(self) -> str:
        counts = {name: len(self._pods(name)) for name in ("controller", "rollout", "reward", "redis", "trainer")}
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def _left(self) -> str:
        kinds = "all,configmaps,secrets,pvc,roles,rolebindings,serviceaccounts,networkpolicies,pdb,scaledobjects"
        ours = f"app.kubernetes.io/instance={RELEASE}"
        return self.cluster.kubectl("get", kinds, "--output", "name", "--selector", ours).strip()

    def _reach(self, client: Client, job: Job, step: int) -> None:
        def there() -> bool:
            now = client.job(job.id)
            assert not now.ended, f"{now.status}: {now.reason}"
            return now.progress.step >= step and now.progress.phase == "rollout"

        self._wait(f"step {step}", there, 240)
        self.log(f"step {step}")

    def _wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.3)

    @contextmanager
    def _client(self) -> Iterator[Client]:
        """By a port-forward to the Service, renewed when its pod goes, with the key of the release's Secret."""
        secret = self.cluster.get("secret", f"{RELEASE}-flowfleet-secrets")
        key = base64.b64decode(secret["data"]["api-key"]).decode()
        port = _free_port()
        forward = (
            f"while :; do kubectl --namespace {self.cluster.namespace} port-forward "
            f"service/{RELEASE}-flowfleet-controller {port}:8470; sleep 0.3; done"
        )
        process = subprocess.Popen(
            ["bash", "-c", forward], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            self._wait("the REST API", lambda: _answers(url), 30)
            with Client(url, key) as client:
                yield client
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _job() -> dict[str, Any]:
    """`make demo`'s job, its trainer in two pods. Paths are those of the images."""
    job = read_job_file(ROOT / "recipes" / "tiny_ocr.toml")
    job["trainer"]["world_size"] = 2
    return job


@contextmanager
def _storage(cluster: Cluster) -> Iterator[list[str]]:
    """Settings for volumes; where the cluster makes none by itself, its node is taken for this machine: two folders."""
    classes = run("kubectl", "get", "storageclass", "--output", "jsonpath={.items[*].metadata.annotations}")
    if re.search(r'is-default-class"?:\s*"?true', classes):
        yield []
        return
    made = cluster.namespace
    names = [f"{made}-{index}" for index in range(2)]
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
