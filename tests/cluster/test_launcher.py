"""Trainers as Jobs of a real cluster: made, followed, made again after what can happen to pods, and cleaned up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowfleet.errors import Unavailable
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from tests.cluster.conftest import CHART, Cluster
from tests.cluster.conftest import run as command_of
from tests.cluster.stand_in import PREFIX, RELEASE, TAG, Release, directory_of, job_of, release, trainer_template
from tests.deploy.conftest import API_SERVER
from tests.waiting import until

Scenario = Callable[[Release], Awaitable[None]]


def run(cluster: Cluster, folder: Path, scenario: Scenario, template: dict[str, Any] | None = None) -> None:
    async def main() -> None:
        async with release(cluster, folder, template) as made:
            await scenario(made)

    asyncio.run(asyncio.wait_for(main(), 240))


async def replaced(made: Release, spec: Any, before: str, reason: str, error: type[Exception]) -> None:
    """The attempt is not alive any more, says why, and the next one serves."""
    await until(lambda: _dead(made))
    with pytest.raises(error, match=reason):
        await made.launcher.ensure(made.job_id, spec)
    assert await made.served(spec) != before
    assert await made.launcher.alive(made.job_id)


async def _dead(made: Release) -> bool:
    return not await made.launcher.alive(made.job_id)


def test_a_job_of_two_pods_serves_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        address = await made.served(job_of(4), 60)
        assert await made.launcher.alive(made.job_id)
        assert await made.launcher.ensure(made.job_id, job_of(4)) == address
        [job] = await made.get("jobs")
        name = job["metadata"]["name"]
        assert address == f"{name}-0.{RELEASE}-trainer.{made.cluster.namespace}.svc:7000"
        assert job["metadata"]["ownerReferences"][0]["name"] == f"{RELEASE}-controller"
        for index in range(2):
            said = await made.kubectl("logs", await made.pod(index))
            assert f"'--node-rank={index}'" in said, "Kubernetes puts the index in"
            assert "'--nnodes=2', '--nproc-per-node=2'" in said
            assert "$(POD_IP)" not in said
        await made.launcher.stop(made.job_id)
        assert not await made.launcher.alive(made.job_id)
        assert await made.get("jobs,pods") == []

    run(cluster, tmp_path, scenario, trainer_template(ranks_per_pod=2))


def test_a_failed_rank_ends_the_attempt_and_the_next_one_serves(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        before = await made.served(job_of(2))
        await made.kubectl("exec", await made.pod(1), "--", "sh", "-c", "echo 3 > /tmp/exit")
        reason = r"the trainer ended: pod 1: exit code 3: the rank fails on request"
        await replaced(made, job_of(2), before, reason, RuntimeError)

    run(cluster, tmp_path, scenario)


def test_the_termination_message_is_those_of_the_rank_that_failed_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Its pod is the last that the cluster tells of."""

    async def scenario(made: Release) -> None:
        await made.served(job_of(2))
        assert await made.launcher.termination_message(made.job_id) == ""
        gone, failed = "1 RuntimeError: Connection refused", "1 rank 1: ValueError: the noise has 3 steps"
        told = (await made.pod(0), f"echo {gone} > /tmp/exit"), (await made.pod(1), f"echo {failed} > /tmp/exit")
        for pod, command in told:
            await made.kubectl("exec", pod, "--", "sh", "-c", command)
        words = "pod 1: exit code 1: rank 1: ValueError: the noise has 3 steps"
        await until(lambda: _dead(made))
        assert await made.launcher.termination_message(made.job_id) == words
        with pytest.raises(RuntimeError, match=words):
            await made.launcher.ensure(made.job_id, job_of(2))

    run(cluster, tmp_path, scenario)


def test_an_evicted_pod_ends_the_attempt_and_the_next_one_serves(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        before = await made.served(job_of(2))
        pod = await made.pod(0)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{made.cluster.namespace}/pods/{pod}/eviction"
        await made.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))
        await replaced(made, job_of(2), before, r"pod \d was evicted or deleted", Unavailable)

    run(cluster, tmp_path, scenario)


def test_a_deleted_pod_ends_the_attempt_and_the_next_one_serves(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        before = await made.served(job_of(1))
        await made.kubectl("delete", "pod", await made.pod(0), "--wait=false")
        await replaced(made, job_of(1), before, "deleted", Unavailable)

    run(cluster, tmp_path, scenario)


def test_a_new_controller_adopts_the_trainer_and_deletes_those_of_ended_jobs(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        address = await made.served(job_of(1))
        async with directory_of(made.cluster) as directory:
            owner = f"{RELEASE}-controller"
            other = KubernetesLauncher(directory, RELEASE, made.cluster.namespace, made.template, owner)
            assert await other.alive(made.job_id)
            assert await other.ensure(made.job_id, job_of(1)) == address
            await other.keep_only([made.job_id])
            assert await other.alive(made.job_id)
            await other.keep_only([])
            await until(lambda: _dead(made))
        await until(lambda: not made.directory.jobs.objects, 60)

    run(cluster, tmp_path, scenario)


def test_trainers_of_another_release_are_not_touched(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        await made.served(job_of(1))
        async with directory_of(made.cluster, "another") as directory:
            other = KubernetesLauncher(directory, "another", made.cluster.namespace, made.template, "none")
            assert not await other.alive(made.job_id)
            await other.keep_only([])
            await other.stop(made.job_id)
        assert await made.launcher.alive(made.job_id)

    run(cluster, tmp_path, scenario)


def test_a_deleted_release_takes_its_trainers_along(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        await made.served(job_of(1))
        await made.kubectl("delete", "deployment", f"{RELEASE}-controller")
        await until(lambda: not made.directory.jobs.objects, 60)

    run(cluster, tmp_path, scenario)


def test_a_job_too_large_for_the_cluster_waits_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        await made.waits(job_of(16), "Insufficient example.com/gpu")
        await made.waits(job_of(16), "(2 of 2 pods); 2 pods of 8 example.com/gpu")
        assert await made.launcher.alive(made.job_id), "it waits and is not restarted"
        assert "Insufficient example.com/gpu" in made.directory.shortage("trainer", made.job_id)

    run(cluster, tmp_path, scenario, trainer_template(ranks_per_pod=8, accelerator="example.com/gpu"))


def test_a_job_in_a_queue_waits_until_it_is_admitted(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        await made.waits(job_of(1), "trainer: waits in queue team-a")
        [job] = await made.get("jobs")
        await made.kubectl("patch", "job", job["metadata"]["name"], "--patch", '{"spec": {"suspend": false}}')
        await made.served(job_of(1))

    run(cluster, tmp_path, scenario, trainer_template(queue="team-a"))


def test_an_image_that_is_not_there_is_told(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(made: Release) -> None:
        await made.waits(job_of(1), "ErrImageNeverPull: Container image")

    template = trainer_template()
    trainer = template["spec"]["template"]["spec"]["containers"][0]
    trainer |= {"image": "localhost/none:1", "imagePullPolicy": "Never"}
    run(cluster, tmp_path, scenario, template)


def test_pods_that_a_quota_refuses_are_told(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.controller.platforms.kubernetes.launcher.NO_PODS_S", 1.0)

    async def scenario(made: Release) -> None:
        await made.waits(job_of(1), "no pod was created: a quota or admission")

    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    cluster.apply(quota)
    run(cluster, tmp_path, scenario)


@pytest.mark.long
def test_the_trainer_of_the_chart_serves_from_two_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Its own image: torchrun's ranks find each other by the headless Service's names, and rank 0 serves."""

    async def scenario(made: Release) -> None:
        await made.served(job_of(2), 200)
        for index in range(2):
            pod = await made.get("pod", await made.pod(index))
            assert pod["spec"]["containers"][0]["image"].endswith(f"flowfleet-trainer:{TAG}")
            assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        begun = time.monotonic()
        await made.launcher.stop(made.job_id)
        assert await made.get("jobs") == []
        print(f"ends within {time.monotonic() - begun:.1f} s")

    objects = chart(cluster, "rbac", "secrets", "trainer", "redis")
    template = None
    for item in objects:
        if item["kind"] == "StatefulSet":
            _without_claim(item["spec"]["template"]["spec"], item["spec"].pop("volumeClaimTemplates")[0])
        if item["metadata"]["name"] == f"{RELEASE}-trainer" and item["kind"] == "ConfigMap":
            template = yaml.safe_load(item["data"]["trainer.yaml"])
        elif item["kind"] != "Service" or item["metadata"]["name"] != f"{RELEASE}-trainer":
            cluster.apply(item)
    assert template is not None
    pod = template["spec"]["template"]["spec"]
    pod["volumes"] = [
        {"name": volume["name"], "emptyDir": {}} if "persistentVolumeClaim" in volume else volume
        for volume in pod["volumes"]
    ]
    run(cluster, tmp_path, scenario, template)


def chart(cluster: Cluster, *templates: str) -> list[dict[str, Any]]:
    """Objects of the CPU profile."""
    values = {
        "fullnameOverride": RELEASE,
        "images": {"registry": PREFIX.rstrip("/"), "tag": TAG, "redis": f"{PREFIX}flowfleet-redis:{TAG}"},
    }
    shown = [flag for name in templates for flag in ("--show-only", f"templates/{name}.yaml")]
    files = (*API_SERVER, "--values", str(CHART / "values-cpu.yaml"), "--values", "-")
    command = ("helm", "template", RELEASE, str(CHART), "--namespace", cluster.namespace, *files, *shown)
    return [found for found in yaml.safe_load_all(command_of(*command, stdin=json.dumps(values))) if found]


def _without_claim(pod: dict[str, Any], claim: dict[str, Any]) -> None:
    """Not every cluster has a class of storage to give."""
    pod.setdefault("volumes", []).append({"name": claim["metadata"]["name"], "emptyDir": {}})
