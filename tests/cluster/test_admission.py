"""What the API server says of the chart: every profile and variant, and each pod by itself."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import pytest

from tests.cluster.conftest import CHART, Cluster
from tests.deploy.conftest import ALL, FULLNAME, Rendered, values_of


@pytest.mark.parametrize("name", ALL)
def test_a_profile_is_admitted_without_a_warning(cluster: Cluster, name: str) -> None:
    """Helm renders with the cluster's own capabilities; the API server then admits each object, without keeping it.
    Warnings about Deployments come from the level that the namespace warns at."""
    cluster.kubectl("label", "namespace", cluster.namespace, "pod-security.kubernetes.io/warn=restricted")
    command = ("helm", "install", "fleet", str(CHART), "--namespace", cluster.namespace, "--dry-run=server")
    done = subprocess.run((*command, *values_of(name)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for said in _apply(cluster, [doc for doc in Rendered(name).objects if doc["kind"] != "Pod"]):
        assert "Warning" not in said, said


@pytest.mark.parametrize("name", ALL)
def test_each_pod_alone_is_admitted_where_restricted_is_enforced(cluster: Cluster, name: str) -> None:
    """A Deployment is admitted whatever its pods are; they are refused later, one by one."""
    rendered = Rendered(name)
    _apply(cluster, rendered.kind("ServiceAccount"), dry_run=False)
    pods = []
    for number, (workload, template) in enumerate(rendered.pods()):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": _alone(template)}
        assert pod["spec"]["containers"], workload
        pods.append(pod)
    assert len(pods) >= 5
    for said in _apply(cluster, pods):
        assert "Warning" not in said, said


def test_a_pod_that_is_not_restricted_would_be_refused(cluster: Cluster) -> None:
    """The check above can fail."""
    rendered = Rendered("nvidia")
    _apply(cluster, rendered.kind("ServiceAccount"), dry_run=False)
    spec = _alone(rendered.pod("controller"))
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        _apply(cluster, [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "loose"}, "spec": spec}])


def test_generated_secrets_are_kept_over_an_upgrade(cluster: Cluster) -> None:
    """Nothing starts here: no replicas, and claims that stay unbound."""
    still = ("--set", "controller.replicas=0,keda.enabled=false,rollout.replicas=0,reward.replicas=0")
    cluster.helm("install", "fleet", str(CHART), *still)
    before = _secrets(cluster)
    assert sorted(before) == [f"{FULLNAME}-redis", f"{FULLNAME}-secrets"]
    cluster.helm("upgrade", "fleet", str(CHART), *still, "--set", "commonLabels.a=b")
    assert _secrets(cluster) == before
    cluster.helm("uninstall", "fleet", "--wait")


def _alone(template: Any) -> Any:
    """Its spec, without classes that the cluster does not have, and with a volume for what a StatefulSet claims."""
    spec = copy.deepcopy(template["spec"])
    spec.pop("runtimeClassName", None)
    spec.pop("priorityClassName", None)
    spec["volumes"].append({"name": "data", "emptyDir": {}})
    return spec


def _apply(cluster: Cluster, objects: list[dict[str, Any]], *, dry_run: bool = True) -> list[str]:
    """What kubectl says on stderr. AssertionError when an object is refused."""
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    flags = ("--dry-run=server",) if dry_run else ()
    command = ("kubectl", "apply", "--namespace", cluster.namespace, "--server-side", *flags, "--filename", "-")
    done = subprocess.run(command, input=manifest, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def _secrets(cluster: Cluster) -> dict[str, Any]:
    mine = cluster.get("secrets", "--selector", "app.kubernetes.io/instance=fleet")
    return {secret["metadata"]["name"]: secret["data"] for secret in mine}
