"""The chart's Role is what the controller needs and no more, tried with its service account's own token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.controller.platforms.kubernetes.api import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    JOBS,
    PODS,
    KubernetesApi,
    Refused,
    Resource,
    connect,
)
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.waiting import NotYet
from tests.cluster.conftest import CHART, Cluster, run
from tests.cluster.stand_in import RELEASE, directory_of, job_of, owner, trainer_template
from tests.deploy.conftest import API_SERVER
from tests.waiting import until

CONTROLLER = "ff-controller"
SLOW_END_S = 20
SECRETS = Resource("/api/v1", "secrets")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
ACCOUNTS = Resource("/api/v1", "serviceaccounts")
ROLES = Resource("/apis/rbac.authorization.k8s.io/v1", "roles")


def install(cluster: Cluster) -> None:
    """The accounts and the role of the chart."""
    flags = (*API_SERVER, "--namespace", cluster.namespace, "--set", f"fullnameOverride={RELEASE}")
    rendered = run("helm", "template", RELEASE, str(CHART), *flags, "--show-only", "templates/rbac.yaml")
    cluster.kubectl("apply", "--filename", "-", stdin=rendered)


@pytest.fixture
def controller(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """KUBECONFIG is the service account's while the test runs."""
    install(cluster)
    cluster.apply(owner())
    token = cluster.kubectl("create", "token", CONTROLLER).strip()
    config = yaml.safe_load(run("kubectl", "config", "view", "--raw", "--flatten", "--minify"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", str(path))
        yield cluster


async def test_it_suffices_to_launch_to_follow_and_to_clean_up(controller: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "trainer.yaml"
        path.write_text(json.dumps(_that_ends_slowly(trainer_template())))
        async with directory_of(controller) as directory:
            launcher = KubernetesLauncher(directory, RELEASE, controller.namespace, path, CONTROLLER)
            job_id = "0190a0b0-0000-7000-8000-0123456789ab"
            await until(lambda: _serves(launcher, job_id), 90)
            assert directory.shortage("trainer", job_id) == ""
            [pod] = directory.pods.objects
            cost = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1"}}}
            await directory.api.patch(PODS, pod, cost)
            begun = time.monotonic()
            await launcher.stop(job_id, at_once=True)
            assert not directory.jobs.objects
            assert time.monotonic() - begun < SLOW_END_S / 2, "its pods are killed at once"
            assert [mirror.problem for mirror in (directory.jobs, directory.pods, directory.slices)] == [""] * 3

    await asyncio.wait_for(scenario(), 200)


def _that_ends_slowly(template: dict[str, Any]) -> dict[str, Any]:
    pod = template["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 2 * SLOW_END_S
    pod["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"seconds": SLOW_END_S}}}
    return template


async def _serves(launcher: KubernetesLauncher, job_id: str) -> bool:
    try:
        return bool(await launcher.ensure(job_id, job_of(1)))
    except NotYet:
        return False


def refused_here(api: KubernetesApi) -> list[Any]:
    """Calls within the namespace that a controller has no business to make."""
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    rules = {"metadata": {"name": "x"}, "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    return [
        api.list(SECRETS, ""),
        api.get(SECRETS, "x"),
        api.create(SECRETS, {"metadata": {"name": "x"}}),
        api.list(CONFIG_MAPS, ""),
        api.list(ROLES, ""),
        api.create(ROLES, rules),
        api.list(DEPLOYMENTS, ""),
        api.get(DEPLOYMENTS, "another"),
        api.patch(DEPLOYMENTS, CONTROLLER, {"spec": {"replicas": 9}}),
        api.delete(DEPLOYMENTS, CONTROLLER),
        api.create(PODS, pod),
        api.create(Resource("/api/v1", "pods/x/exec"), {}),
        api.create(Resource("/api/v1", "pods/x/attach"), {}),
        api.create(Resource("/api/v1", "pods/x/eviction"), {"metadata": {"name": "x"}}),
        api.get(Resource("/api/v1", "pods/x/log"), ""),
        api.patch(JOBS, "x", {"spec": {"parallelism": 9}}),
        api.create(ENDPOINT_SLICES, {"metadata": {"name": "x"}, "addressType": "IPv4", "endpoints": []}),
        api.delete(ENDPOINT_SLICES, "x"),
        api.create(Resource("/api/v1", f"serviceaccounts/{CONTROLLER}/token"), {"spec": {}}),
        api.create(ACCOUNTS, {"metadata": {"name": "x"}}),
    ]


async def test_it_allows_no_more(controller: Cluster) -> None:
    async def scenario() -> None:
        api, other = await connect(controller.namespace), await connect("kube-system")
        elsewhere: list[Any] = [other.list(resource, "") for resource in (PODS, JOBS, ENDPOINT_SLICES, SECRETS)]
        elsewhere += [other.create(JOBS, trainer_template())]
        for number, call in enumerate([*refused_here(api), *elsewhere]):
            with pytest.raises(Refused, match=r"\(403"):
                raise AssertionError(f"call {number} went through: {await call}")
        await api.close()
        await other.close()

    await asyncio.wait_for(scenario(), 60)


@pytest.mark.parametrize(
    "kind", ["nodes", "namespaces", "clusterroles", "persistentvolumes", "pods", "secrets", "jobs"]
)
def test_it_sees_nothing_of_the_cluster(controller: Cluster, kind: str) -> None:
    with pytest.raises(AssertionError, match=r"Forbidden"):
        run("kubectl", "get", kind, "--all-namespaces")


def test_other_pods_of_the_release_get_no_token(cluster: Cluster) -> None:
    install(cluster)
    accounts = {item["metadata"]["name"]: item for item in cluster.get("serviceaccounts")}
    assert accounts[RELEASE]["automountServiceAccountToken"] is False
    bindings = cluster.get("rolebindings")
    assert [subject["name"] for binding in bindings for subject in binding["subjects"]] == [CONTROLLER]
