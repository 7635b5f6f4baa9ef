"""The chart's admission policy: of the Jobs that the controller's account sends only the chart's own are admitted."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from flowfleet.job.spec import parse_job
from services.controller.platforms.kubernetes.template import TrainerTemplate, parse_template
from tests.cluster.conftest import CHART, Cluster, run
from tests.deploy.conftest import API_SERVER, FULLNAME, values_of

JOB_ID = "01a20091-df5f-7685-9395-c3a57230f852"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Change of a Job's pod and its container."""

ENV = {"FLOWFLEET_RPC_ACCEPT_JOB": "0" * 64}
SECRETS = ("FLOWFLEET_REDIS_LOGIN", "FLOWFLEET_RPC_TOKEN", "FLOWFLEET_RPC_ACCEPT")
CRAFTED: dict[str, tuple[Change, str]] = {
    "another image": (lambda pod, trainer: trainer.update(image="evil:1"), "a trainer's image is"),
    "a second container": (
        lambda pod, trainer: pod["containers"].append({**trainer, "name": "second"}),
        "one container",
    ),
    "an init container": (
        lambda pod, trainer: pod.update(initContainers=[*pod.get("initContainers", []), {**trainer, "name": "first"}]),
        "init containers are those",
    ),
    "another command of an init container": (
        lambda pod, trainer: pod.update(
            initContainers=[{**init, "args": ["id"]} for init in pod.get("initContainers", [{**trainer, "name": "x"}])]
        ),
        "init containers are those",
    ),
    "another claim": (
        lambda pod, trainer: pod.update(resourceClaims=[{"name": "gpu", "resourceClaimName": "of-another"}]),
        "resource claims are those",
    ),
    "the controller's account": (
        lambda pod, trainer: pod.update(serviceAccountName=f"{FULLNAME}-controller"),
        "a trainer's service account is",
    ),
    "a token": (lambda pod, trainer: pod.update(automountServiceAccountToken=True), "its token is not mounted"),
    "the node's network": (lambda pod, trainer: pod.update(hostNetwork=True), "shares nothing of its node"),
    "the node's processes": (lambda pod, trainer: pod.update(hostPID=True), "shares nothing of its node"),
    "a node of its choice": (lambda pod, trainer: pod.update(nodeName="node"), "shares nothing of its node"),
    "the node's root": (
        lambda pod, trainer: pod["volumes"].append({"name": "root", "hostPath": {"path": "/"}}),
        "volumes are those",
    ),
    "the state volume's name for a path": (
        lambda pod, trainer: next(v for v in pod["volumes"] if v["name"] == "state").update(
            persistentVolumeClaim=None, hostPath={"path": "/"}
        ),
        "volumes are those",
    ),
    "another Secret": (
        lambda pod, trainer: pod["volumes"].append({"name": "s", "secret": {"secretName": "other"}}),
        "volumes are those",
    ),
    "another mount": (
        lambda pod, trainer: trainer["volumeMounts"].append({"name": "tmp", "mountPath": "/opt"}),
        "mounts are those",
    ),
    "more privileges": (
        lambda pod, trainer: trainer["securityContext"].update(allowPrivilegeEscalation=True),
        "no privileges",
    ),
    "root": (lambda pod, trainer: pod["securityContext"].update(runAsUser=0), "no privileges"),
    "a capability": (
        lambda pod, trainer: trainer["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "no privileges",
    ),
    "the token of a job from a Secret": (
        lambda pod, trainer: next(e for e in trainer["env"] if e["name"] in ENV).update(
            value=None, valueFrom={"secretKeyRef": {"name": "other", "key": "k"}}
        ),
        "environment is that",
    ),
    "a command": (lambda pod, trainer: trainer.update(command=["sh", "-c", "id"]), "runs services.trainer"),
    "another module": (
        lambda pod, trainer: trainer["args"].__setitem__(trainer["args"].index("services.trainer"), "http.server"),
        "runs services.trainer",
    ),
    "a hook": (
        lambda pod, trainer: trainer.update(lifecycle={"postStart": {"exec": {"command": ["id"]}}}),
        "runs services.trainer",
    ),
    "a variable": (
        lambda pod, trainer: trainer["env"].append({"name": "LD_PRELOAD", "value": "/tmp/x.so"}),
        "environment is that",
    ),
    "another Redis": (
        lambda pod, trainer: next(e for e in trainer["env"] if e["name"] == "FLOWFLEET_STATE_DIR").update(value="/x"),
        "environment is that",
    ),
    "a key of a Secret": (
        lambda pod, trainer: next(e for e in trainer["env"] if e["name"] == "POD_NAME").update(
            valueFrom={"secretKeyRef": {"name": f"{FULLNAME}-secrets", "key": "api-key"}}
        ),
        "environment is that",
    ),
    "another Secret's word for its token": (
        lambda pod, trainer: next(e for e in trainer["env"] if e["name"] == "FLOWFLEET_RPC_TOKEN").update(
            valueFrom={"secretKeyRef": {"name": "other", "key": "FLOWFLEET_RPC_TOKEN"}}
        ),
        "environment is that",
    ),
    "a priority class": (
        lambda pod, trainer: pod.update(priorityClassName="system-node-critical"),
        "queue and priority class are those",
    ),
    "a whole Secret": (
        lambda pod, trainer: trainer.update(envFrom=[{"secretRef": {"name": "other"}}]),
        "no other ConfigMap or Secret",
    ),
}


@pytest.fixture(params=("nvidia", "ascend", "everything"))
def template(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[TrainerTemplate]:
    """The chart's template, in a namespace with its accounts, rights and policy."""
    parts = ("rbac.yaml", "trainer-policy.yaml", "trainer.yaml")
    show = [word for part in parts for word in ("--show-only", f"templates/{part}")]
    allowed = "trainer.allowed.queues={team-a},trainer.allowed.priorityClasses={urgent}"
    flags = ["--set", f"trainer.admissionPolicy.enabled=true,{allowed}", "--kube-version", "1.30", *API_SERVER]
    text = run(
        "helm",
        "template",
        "fleet",
        str(CHART),
        "--namespace",
        cluster.namespace,
        *flags,
        *values_of(request.param),
        *show,
    )
    objects = [doc for doc in yaml.safe_load_all(text) if doc]
    cluster.kubectl("apply", "--filename", "-", stdin=text)
    policy = next(doc for doc in objects if doc["kind"] == "ValidatingAdmissionPolicy")["metadata"]["name"]
    found = next(doc for doc in objects if doc["kind"] == "ConfigMap")["data"]["trainer.yaml"]
    try:
        _await_policy(cluster, policy)
        yield parse_template(yaml.safe_load(found))
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            run("kubectl", "delete", kind, policy)


def test_the_controllers_account_may_create_trainers_and_nothing_else(
    cluster: Cluster, template: TrainerTemplate
) -> None:
    own = rendered(template)
    wait_until_enforced(cluster, own)
    assert send(cluster, own) == ""
    for name, (change, words) in CRAFTED.items():
        crafted = copy.deepcopy(own)
        pod = crafted["spec"]["template"]["spec"]
        change(pod, pod["containers"][0])
        said = send(cluster, crafted)
        assert "denied request" in said, (name, said or "it was admitted")
        assert words in said, (name, said)
    loose = copy.deepcopy(own)
    loose["metadata"]["ownerReferences"] = []
    assert "belongs to the controller's Deployment" in send(cluster, loose)
    loose = copy.deepcopy(own)
    loose["metadata"]["labels"]["app.kubernetes.io/component"] = "controller"
    assert "labels are those" in send(cluster, loose)
    loose = copy.deepcopy(own)
    loose["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "of-others"
    assert "queue and priority class are those" in send(cluster, loose)
    chosen = rendered(template, queue="team-a", priority_class="urgent")
    assert send(cluster, chosen) == "", "of those that the chart allows jobs"


def rendered(template: TrainerTemplate, **asked: str) -> dict[str, Any]:
    """Renders the Job like the controller."""
    spec = parse_job(
        {
            "model": {"path": "/m"},
            "data": {"train": "/p.txt"},
            "rewards": {"ocr": {}},
            "trainer": {"world_size": 2, "threads": 2, "kubernetes": asked},
        }
    )
    owner = {
        "apiVersion": "apps/v1", "kind": "Deployment", "name": f"{FULLNAME}-controller", "uid": JOB_ID,
    }  # fmt: skip
    return template.render(
        JOB_ID, spec, name=f"{FULLNAME}-trainer-a-b", labels={}, owner=owner, env=ENV, secrets=SECRETS
    )


def send(cluster: Cluster, job: dict[str, Any]) -> str:
    """What the API server says to the controller's account; empty where it admits the Job."""
    account = f"system:serviceaccount:{cluster.namespace}:{FULLNAME}-controller"
    command = ("kubectl", "create", "--namespace", cluster.namespace, "--as", account, "--dry-run=server", "-f", "-")
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


def wait_until_enforced(cluster: Cluster, own: dict[str, Any]) -> None:
    """The API server takes a policy up within seconds."""
    other = copy.deepcopy(own)
    other["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    deadline = time.monotonic() + 60
    while not send(cluster, other):
        assert time.monotonic() < deadline, "the policy is not enforced"
        time.sleep(0.5)


def _await_policy(cluster: Cluster, name: str) -> None:
    """Waits until the API server has checked the types of its expressions; there are no warnings."""
    deadline = time.monotonic() + 60
    while "typeChecking" not in (found := cluster.get("validatingadmissionpolicy", name)).get("status", {}):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert not found["status"]["typeChecking"].get("expressionWarnings"), found["status"]["typeChecking"]
