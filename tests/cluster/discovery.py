"""What Prometheus's Kubernetes service discovery would find, for builds without it, such as Debian's: targets with the
same `__meta_kubernetes_…` labels, in files that Prometheus follows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.conftest import Cluster

PERIOD_S = 2.0

Object = dict[str, Any]


class Discovery:
    """Keeps `<role>.json` in a directory true, from a thread, until it is stopped."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        self._look()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self._look()
            except AssertionError:
                continue  # the API server is unreachable or slow: the last targets stay

    def _look(self) -> None:
        objects = self._cluster.get("services,endpointslices,pods")
        for role, targets in (("endpointslice", endpointslice_targets(objects)), ("pod", pod_targets(objects))):
            aside = self._directory / f".{role}.json"
            aside.write_text(json.dumps(list(targets)))
            aside.replace(self._directory / f"{role}.json")


def endpointslice_targets(objects: list[Object]) -> Iterator[Object]:
    """One a port and pod of every slice, with the labels of its Service."""
    services = {name_of(item): item for item in objects if item["kind"] == "Service"}
    pods = {name_of(item): item for item in objects if item["kind"] == "Pod"}
    for item in objects:
        if item["kind"] != "EndpointSlice":
            continue
        service = services.get(item["metadata"]["labels"]["kubernetes.io/service-name"])
        for endpoint in item.get("endpoints") or ():
            pod = pods.get(endpoint.get("targetRef", {}).get("name", ""))
            if service is None or pod is None:
                continue
            for port in item.get("ports") or ():
                labels = {"endpointslice_port_name": port.get("name", ""), **_labels("service", service), **_pod(pod)}
                yield _target(endpoint["addresses"][0], port["port"], labels)


def pod_targets(objects: list[Object]) -> Iterator[Object]:
    """One a declared port of every pod that has an address."""
    for pod in (item for item in objects if item["kind"] == "Pod" and item["status"].get("podIP")):
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                labels = {"pod_container_port_name": port.get("name", ""), **_pod(pod)}
                yield _target(pod["status"]["podIP"], port["containerPort"], labels)


def sanitized(name: str) -> str:
    """Writes a Kubernetes label's name as Prometheus does."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def name_of(item: Object) -> str:
    name: str = item["metadata"]["name"]
    return name


def _pod(pod: Object) -> dict[str, str]:
    facts = {"pod_name": name_of(pod), "pod_phase": pod["status"]["phase"], "namespace": pod["metadata"]["namespace"]}
    return {**facts, **_labels("pod", pod)}


def _labels(of: str, item: Object) -> dict[str, str]:
    labels = item["metadata"].get("labels") or {}
    return {f"{of}_label_{sanitized(name)}": value for name, value in labels.items()}


def _target(host: str, port: int, labels: Mapping[str, str]) -> Object:
    named = {f"__meta_kubernetes_{name}": value for name, value in labels.items()}
    return {"targets": [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"], "labels": named}
