"""A highly available Redis in a cluster: its primary's pod is deleted and killed while a job runs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from flowfleet.client import Client
from flowfleet.job.spec import read_job_file
from tests.cluster.conftest import CHART, Cluster
from tests.cluster.release import Log, Release, storage

STEPS, SAMPLES_A_STEP = 6, 16
NOTED = "/var/lib/flowfleet/redis-acknowledged.json"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_job_survives_the_loss_of_redis_primary(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(capsys)
    with storage(cluster, 4) as volumes:
        release = Failovers(cluster, "ha", log, [*volumes, *_settings()])
        try:
            release.helm("install")
            log(f"installed: {release.pods_told()}")
            release.run()
        except BaseException:
            release.tell()
            raise
        cluster.helm("uninstall", release.name, "--wait", "--timeout", "3m")


class Failovers(Release):
    def run(self) -> None:
        with self.client() as client:
            job = client.submit(_job())
            self.reach(client, job, 1)
            self.strike("deleted")
            self.reach(client, job, 3)
            self.strike("killed", "--grace-period=0", "--force")
            job = client.wait(job.id, 240)
            assert job.status == "succeeded", job.reason
            assert job.results["samples_trained"] == STEPS * SAMPLES_A_STEP, job.results
            assert job.results["samples_dropped"] == {}, job.results
            self.log(f"{job.status}: {job.results['samples_trained']} trained, none dropped")
            self.look(client)

    def strike(self, what: str, *flags: str) -> None:
        """Another pod is the primary afterwards, and the one that went is its replica."""
        before = self.primary()
        self.cluster.kubectl("delete", "pod", before, "--wait=false", *flags)
        began = time.monotonic()
        self.wait("another primary", lambda: self.primary() not in ("", before), 60)
        self.log(f"{before} {what}: {self.primary()} is the primary after {time.monotonic() - began:.1f} s")
        self.wait("three pods that are ready", lambda: len(_ready(self.pods("redis"))) == 3, 120)

    def primary(self) -> str:
        """Primary according to two of three pods that answer; "" if there is none."""
        found = []
        for pod in self.pods("redis"):
            name = pod["metadata"]["name"]
            command = ("exec", name, "--container", "redis", "--", "sh", "-c")
            try:
                ask = ". /etc/redis/client.sh; primary"
                found.append(self.cluster.kubectl(*command, ask).split()[0].partition(".")[0])
            except (AssertionError, IndexError):
                continue
        return next((name for name in found if found.count(name) >= 2), "")

    def look(self, client: Client) -> None:
        controller = f"deployment/{self.name}-flowfleet-controller"
        noted = json.loads(self.cluster.kubectl("exec", controller, "--", "cat", NOTED))
        assert noted["number"] > 10
        assert client.fleet().shortages == []
        self.log(f"noted: {noted}")


def _settings() -> list[str]:
    """All three pods on the one node that there may be."""
    return [
        *("--set", "redis.highAvailability.enabled=true,keda.enabled=false"),
        *("--set-json", 'redis.affinity={"nodeAffinity":{}}'),
        *("--set", "redis.resources.limits.memory=256Mi"),
    ]


def _job() -> dict[str, Any]:
    job = read_job_file(CHART.parents[2] / "recipes" / "tiny_ocr.toml")
    job["schedule"] |= {"steps": STEPS, "save_every": 2, "validation_steps": 2}
    job["rollout"] |= {"prompts_per_step": 2, "group_size": SAMPLES_A_STEP // 2, "batch_size": SAMPLES_A_STEP}
    job["trainer"] |= {"micro_batch_size": SAMPLES_A_STEP, "updates_per_step": 1}
    return job


def _ready(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        pod
        for pod in pods
        if any(part["type"] == "Ready" and part["status"] == "True" for part in pod["status"].get("conditions", ()))
    ]
