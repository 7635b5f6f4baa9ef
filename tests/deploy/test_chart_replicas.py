"""Replicas of what KEDA scales, rendered against an API server that helm can ask."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import API_SERVER, CHART, FULLNAME, Rendered, helm


@functools.cache
def resources() -> dict[str, dict[str, str]]:
    """Version → plural → kind, of what the chart renders and asks for."""
    found: dict[str, dict[str, str]] = {}
    for doc in [*Rendered().objects, {"apiVersion": "v1", "kind": "ServiceAccount"}]:
        plural = doc["kind"].lower() + "s"
        found.setdefault(doc["apiVersion"], {})[plural.replace("ys", "ies")] = doc["kind"]
    return found


def answer(path: str, deployments: dict[str, int]) -> Any:
    """What an API server with these Deployments says to what helm asks; None: not found."""
    kind, _, name = path.partition("?")[0].rpartition("/")
    if path.startswith("/version"):
        return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
    if path.startswith("/apis?") or path == "/apis":
        groups = [version.split("/") for version in resources() if "/" in version]
        versions = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in groups]
        named = [{"name": it["groupVersion"].split("/")[0], "versions": [it]} for it in versions]
        return {"kind": "APIGroupList", "groups": named}
    if path.startswith("/api?") or path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    for version, kinds in resources().items():
        if path.partition("?")[0] in (f"/api/{version}", f"/apis/{version}"):
            found = [
                {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]} for plural, kind in kinds.items()
            ]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": found}
    if kind.endswith("/serviceaccounts") and name == "default":
        return {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": {"name": name}}
    if kind.endswith("/deployments") and name in deployments:
        release = {"meta.helm.sh/release-name": "fleet", "meta.helm.sh/release-namespace": "ns"}
        owned = {"name": name, "labels": {"app.kubernetes.io/managed-by": "Helm"}, "annotations": release}
        spec = {"replicas": deployments[name]}
        return {"kind": "Deployment", "apiVersion": "apps/v1", "metadata": owned, "spec": spec}
    return None


@pytest.fixture
def asked() -> Iterator[tuple[str, dict[str, int]]]:
    """The URL of an API server, and the replicas of its Deployments."""
    deployments: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path, deployments)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.wfile.write(json.dumps(body or missing).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", deployments
    server.shutdown()
    server.server_close()


def rendered(url: str, *flags: str) -> dict[str, Any]:
    """Replicas of each Deployment, as it would be installed; None where none are said."""
    done = helm(
        *("template", "fleet", str(CHART), "--namespace", "ns", *API_SERVER),
        *("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url, *flags),
    )
    assert done.returncode == 0, done.stderr
    documents = [doc for doc in yaml.safe_load_all(done.stdout) if doc and doc["kind"] == "Deployment"]
    return {doc["metadata"]["name"]: doc["spec"].get("replicas") for doc in documents}


def test_a_new_pool_has_no_replica_and_kedas_number_stays(asked: tuple[str, dict[str, int]]) -> None:
    url, deployments = asked
    pool, reward = f"{FULLNAME}-rollout-default", f"{FULLNAME}-reward-ocr"
    new = rendered(url)
    assert (new[pool], new[reward]) == (0, 0)
    assert rendered(url, "--set", "rollout.autoscaling.minReplicas=2")[pool] == 2
    deployments |= {pool: 5, reward: 0}
    live = rendered(url, "--set", "rollout.autoscaling.minReplicas=2")
    assert (live[pool], live[reward]) == (5, 0)
    assert rendered(url, "--set", "keda.enabled=false", "--set", "rollout.replicas=3")[pool] == 3
