"""Renders the chart. Needs `helm` on PATH, else tests of the chart are skipped."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "flowfleet"
FULLNAME = "fleet-flowfleet"
PROFILES = ("nvidia", "cpu", "ascend", "rdma", "kueue", "gitops")
VARIANTS = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))
ALL = (*PROFILES, *VARIANTS)

Object = dict[str, Any]


API_SERVER = ("--set-json", 'networkPolicy.apiServer.cidrs=["10.0.0.1/32"]')
"""What helm cannot ask a cluster for where it only renders."""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.skip("needs helm: install Helm 3 or 4 and put it on PATH")
    return subprocess.run(("helm", *arguments), capture_output=True, text=True, timeout=60)


def values_of(name: str) -> tuple[str, ...]:
    """The flags of a profile or variant."""
    if name == "nvidia":
        return ()
    path = f"values-{name}.yaml" if name in PROFILES else f"ci/{name}-values.yaml"
    return "--values", str(CHART / path)


@functools.cache
def _manifest(name: str, settings: tuple[str, ...]) -> str:
    sets = [flag for setting in settings for flag in ("--set-json", setting)]
    done = helm("template", "fleet", str(CHART), "--namespace", "ns", *API_SERVER, *values_of(name), *sets)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Rendered:
    """Objects of a rendering, and what is inside them."""

    def __init__(self, name: str = "nvidia", *settings: str) -> None:
        self.objects: list[Object] = [doc for doc in yaml.safe_load_all(_manifest(name, settings)) if doc]

    def kind(self, kind: str) -> list[Object]:
        return [doc for doc in self.objects if doc["kind"] == kind]

    def get(self, kind: str, suffix: str) -> Object:
        """Gets a resource by its name without the release's prefix; "" is the release's own."""
        name = "-".join(filter(None, (FULLNAME, suffix)))
        found = [doc for doc in self.kind(kind) if doc["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} {kind} {name}: {[doc['metadata']['name'] for doc in self.kind(kind)]}"
        return found[0]

    @property
    def trainer(self) -> Object:
        """The Job of the template for the controller."""
        job: Object = yaml.safe_load(self.get("ConfigMap", "trainer")["data"]["trainer.yaml"])
        return job

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Name of the workload, and its pod with metadata and spec."""
        for doc in self.kind("Deployment") + self.kind("StatefulSet"):
            yield doc["metadata"]["name"], doc["spec"]["template"]
        yield "trainer", self.trainer["spec"]["template"]
        yield "test", self.get("Pod", "test")

    def pod(self, suffix: str) -> Object:
        """Pod of a Deployment or StatefulSet."""
        kind = "StatefulSet" if suffix in ("redis", "redis-ha") else "Deployment"
        template: Object = self.get(kind, suffix)["spec"]["template"]
        return template


def container(pod: Object) -> Object:
    """The one; of a highly available Redis that of the server, before its Sentinel."""
    only, *more = pod["spec"]["containers"]
    assert isinstance(only, dict)
    assert [other["name"] for other in more] in ([], ["sentinel"])
    return only


def environment(pod: Object) -> dict[str, Any]:
    """Name → value, or what it is taken from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(pod)["env"]}


def flags(pod: Object) -> dict[str, str]:
    """--name=value of the container's arguments."""
    return {name: value for name, _, value in (argument.partition("=") for argument in container(pod)["args"])}


def selects(selector: Object, labels: Object) -> bool:
    """A label selector, as Kubernetes matches it."""
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@pytest.fixture(params=ALL)
def any_profile(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)
