"""When a Deployment is scaled in, its idle pods go first."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from services.controller.fleet.replicas import Replica
from services.controller.platforms.kubernetes.api import PODS, connect
from services.controller.platforms.kubernetes.deletion_cost import ANNOTATION, cost, keep_deletion_costs
from tests.cluster.conftest import Cluster
from tests.cluster.test_keda import deployment


def pods(cluster: Cluster) -> dict[str, str]:
    """Name → deletion cost of those that are to stay."""
    found = [pod["metadata"] for pod in cluster.get("pods", "--selector", "app=pool")]
    return {
        one["name"]: one.get("annotations", {}).get(ANNOTATION, "") for one in found if "deletionTimestamp" not in one
    }


async def test_the_busy_pod_stays(cluster: Cluster) -> None:
    cluster.apply(deployment("pool"))
    cluster.kubectl("scale", "deployment", "pool", "--replicas", "3")
    cluster.kubectl("rollout", "status", "deployment", "pool", "--timeout", "60s")
    busy = sorted(pods(cluster))[1]
    outstanding = {name: 24 if name == busy else 0 for name in pods(cluster)}
    replicas = [Replica(name, "10.0.0.1:7000", outstanding=number) for name, number in outstanding.items()]
    runner: Any = SimpleNamespace(leads=True, fleet_view=lambda: [*replicas, Replica("elsewhere", "h:1")])

    async def tell() -> None:
        api = await connect(cluster.namespace)

        async def set_cost(pod: str, number: int) -> None:
            await api.patch(PODS, pod, {"metadata": {"annotations": {ANNOTATION: str(number)}}})

        task = asyncio.create_task(keep_deletion_costs(runner, set_cost))
        expected = {name: str(cost(number)) for name, number in outstanding.items()}
        async with asyncio.timeout(30):
            while await asyncio.to_thread(pods, cluster) != expected:
                await asyncio.sleep(0.2)
        assert not task.done()
        task.cancel()
        await api.close()

    await tell()
    cluster.kubectl("scale", "deployment", "pool", "--replicas", "1")
    deadline = time.monotonic() + 30
    while len(left := pods(cluster)) > 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert list(left) == [busy]
