"""A node is drained under four rollouts and a trainer of two pods, twice, while a job runs: nothing is lost, and the
weights are those of the run without drains.

Pods are evicted as `kubectl drain` evicts them: all at once, by the Eviction API, again after 5 s where a disruption
budget refuses. The node is not cordoned: in a cluster of one node their successors have no other. Needs what
test_demo.py needs.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from flowfleet.client import Client
from tests.cluster.conftest import Cluster
from tests.cluster.release import Log, storage
from tests.cluster.test_faults import Faults, _job, _ready, _settings
from tests.faults.watch import Watch

ROLLOUTS, LONGEST_S, AGAIN_S = 4, 600.0, 5.0
REPLICAS = ("--set", f"rollout.autoscaling.minReplicas={ROLLOUTS},rollout.autoscaling.maxReplicas={ROLLOUTS}")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_drained_node_costs_no_sample(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(capsys)
    with storage(cluster) as volumes:
        release = Drained(cluster, "drain", log, [*volumes, *_settings(), *REPLICAS])
        try:
            release.helm("install")
            with release.client() as client:
                undisturbed = release.ended(client, client.submit(_job()), tmp_path / "undisturbed")
                drained = release.drained(client, tmp_path / "drained")
            assert drained == undisturbed, "the weights are not those of the run without drains"
            log(f"the weights are those of the run without drains: {drained}")
        except BaseException:
            release.tell()
            raise


class Drained(Faults):
    def drained(self, client: Client, folder: Path) -> str:
        """Hash of the weights of a job whose pods are drained twice."""
        job = client.submit(_job())
        watch = Watch(client.url, job.id, {"authorization": f"Bearer {self.api_key}"}, poll_s=0.1)
        try:
            assert watch.until(lambda sight: sight.step >= 3, 180), watch.now
            for number in (1, 2):
                self.wait(f"{ROLLOUTS} rollouts", lambda: len(_ready(self.pods("rollout"))) == ROLLOUTS, 240)
                self.strike(watch, f"drain {number}", self.drain)
            return self.ended(client, job, folder)
        finally:
            watch.close()

    def drain(self) -> None:
        """Evicts the pods, and waits until as many others are ready."""
        began, left = time.monotonic(), self.names("rollout", "trainer")
        assert len(left) == ROLLOUTS + 2, left
        gone = set(left)
        while left:
            left -= {name for name in left if self.evicted(name)}
            assert time.monotonic() - began < LONGEST_S, f"not evicted: {left}"
            if left:
                time.sleep(AGAIN_S)
        self.log(f"the last of {len(gone)} pods was evicted after {time.monotonic() - began:.1f} s")
        self.wait("two trainer pods", lambda: len(self.names("trainer") - gone) == 2, LONGEST_S)

    def evicted(self, name: str) -> bool:
        """False where the pod's disruption budget refuses."""
        place = f"/api/v1/namespaces/{self.cluster.namespace}/pods/{name}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        command = ["kubectl", "create", "--raw", place, "--filename", "-"]
        done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=60)
        told = done.stdout + done.stderr
        assert done.returncode == 0 or "disruption budget" in told or "not found" in told, told
        return "disruption budget" not in told
