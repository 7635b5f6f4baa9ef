"""Tests against a real Kubernetes: the one that KUBECONFIG names. `make test-cluster` runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CHART = HERE.parent.parent / "deploy" / "helm" / "flowfleet"
ENFORCE = "pod-security.kubernetes.io/enforce=restricted"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests here, and skips them where there is no cluster to run them in."""
    missing = _missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str:
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG names no cluster"
    absent = [tool for tool in ("kubectl", "helm") if shutil.which(tool) is None]
    return f"{', '.join(absent)} not on PATH" if absent else ""


@dataclass(frozen=True)
class Cluster:
    """kubectl and helm in one namespace."""

    namespace: str

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """stdout. Raises AssertionError with stderr when the command fails."""
        return run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str, timeout_s: float = 300.0) -> str:
        return run("helm", "--namespace", self.namespace, *arguments, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Any:
        """The object, or the list's items."""
        found = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return found.get("items", found)

    def apply(self, *objects: dict[str, Any]) -> None:
        manifest = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--filename", "-", stdin=json.dumps(manifest))


def run(*command: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A namespace of its own that enforces the restricted Pod Security standard, deleted in the end."""
    made = Cluster(f"ff-test-{uuid.uuid4().hex[:8]}")
    run("kubectl", "create", "namespace", made.namespace)
    run("kubectl", "label", "namespace", made.namespace, ENFORCE)
    try:
        yield made
    finally:
        run("kubectl", "delete", "namespace", made.namespace, "--wait=false")
