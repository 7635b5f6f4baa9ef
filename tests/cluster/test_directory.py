"""Pools and rewards of a release as its Services and Deployments change."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from prometheus_client import CollectorRegistry

from services.controller.platforms.kubernetes.directory import NAME_LABEL, KubernetesDirectory
from tests.cluster.conftest import Cluster
from tests.cluster.stand_in import RELEASE, directory_of, idle
from tests.waiting import until


def labels_of(component: str, name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/component": component,
        NAME_LABEL[component]: name,
    }


def service(component: str, name: str) -> dict[str, Any]:
    labels = labels_of(component, name)
    ports = [{"name": "grpc", "port": 7000}, {"name": "metrics", "port": 9470}]
    metadata = {"name": f"{RELEASE}-{component}-{name}", "labels": labels}
    spec = {"clusterIP": "None", "selector": labels, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def deployment(component: str, name: str, replicas: int, **limits: str) -> dict[str, Any]:
    """A Deployment of pods that do nothing."""
    labels = labels_of(component, name)
    of_pod = {"containers": [idle("main", **limits)], "terminationGracePeriodSeconds": 1}
    pod = {"metadata": {"labels": labels}, "spec": of_pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod}
    metadata = {"name": f"{RELEASE}-{component}-{name}", "labels": labels}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


async def test_addresses_follow_the_endpoint_slices(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with directory_of(cluster) as directory:
            assert (directory.rewards, set(directory.pools or ())) == ({}, set())
            await asyncio.to_thread(cluster.apply, service("reward", "ocr"), deployment("reward", "ocr", 0))
            await until(lambda: directory.rewards == {"ocr": ()})
            await scaled(directory, 2)
            first = directory.rewards["ocr"]
            pods = await asyncio.to_thread(cluster.get, "pods")
            assert sorted(first) == sorted(f"{pod['status']['podIP']}:7000" for pod in pods)
            await scaled(directory, 1)
            assert set(directory.rewards["ocr"]) < set(first)
            await asyncio.to_thread(cluster.apply, service("reward", "jpeg"), service("rollout", "video"))
            await until(lambda: "jpeg" in directory.rewards and "video" in (directory.pools or ()))
            await asyncio.to_thread(cluster.kubectl, "delete", "service", f"{RELEASE}-reward-ocr")
            await until(lambda: set(directory.rewards) == {"jpeg"})

    async def scaled(directory: KubernetesDirectory, replicas: int) -> None:
        scale = ("scale", "deployment", f"{RELEASE}-reward-ocr", f"--replicas={replicas}")
        begun = time.monotonic()
        await asyncio.to_thread(cluster.kubectl, *scale)
        await until(lambda: len(directory.rewards["ocr"]) == replicas, 60)
        print(f"{replicas} replicas are known after {time.monotonic() - begun:.1f} s")

    await asyncio.wait_for(scenario(), 200)


async def test_pods_without_a_node_are_told_and_counted(cluster: Cluster) -> None:
    async def scenario() -> None:
        registry = CollectorRegistry()
        async with directory_of(cluster, registry=registry) as directory:
            many = deployment("rollout", "default", 2, **{"example.com/gpu": "1"})
            await asyncio.to_thread(cluster.apply, service("rollout", "default"), service("reward", "ocr"), many)
            reason = re.compile(r"0/\d+ nodes are available: .*Insufficient example.com/gpu.* \(2 of 2 pods\)")
            await until(lambda: bool(reason.fullmatch(directory.shortage("rollout", "default"))))
            assert directory.shortage("reward", "ocr") == ""
            assert {name: count(registry, *name) for name in (("rollout", "default"), ("reward", "ocr"))} == {
                ("rollout", "default"): 2.0,
                ("reward", "ocr"): 0.0,
            }

    await asyncio.wait_for(scenario(), 100)


def count(registry: CollectorRegistry, component: str, name: str) -> float | None:
    return registry.get_sample_value("flowfleet_unschedulable_pods", {"component": component, "name": name})
