"""The pools and rewards of a Helm release, from the EndpointSlices of their Services, and what keeps their pods away.

A Service without pods has an EndpointSlice without endpoints, so a pool or a reward scaled to zero is known as such.
What `helm upgrade` adds, replaces or removes is seen by a watch: the controller keeps running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flowfleet.errors import Unavailable
from flowfleet.process.service import format_address
from services.controller.concurrency import end
from services.controller.platforms.kubernetes import pods
from services.controller.platforms.kubernetes.api import ENDPOINT_SLICES, JOBS, PODS, KubernetesApi, Object, connect
from services.controller.platforms.kubernetes.mirror import Mirror

log = logging.getLogger(__name__)

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
NAME_LABEL = {"rollout": "flowfleet.io/pool", "reward": "flowfleet.io/reward", "trainer": "flowfleet.io/job"}
"""Component → the label that says which one it is."""
PORT = 7000
PORT_NAME = "grpc"
START_TIMEOUT_S = 30.0


class KubernetesDirectory(Collector):
    """Directory of a release in a namespace. `jobs` and `pods` are the trainers' too, for their launcher."""

    def __init__(self, release: str, namespace: str, registry: CollectorRegistry) -> None:
        self._release = release
        self._namespace = namespace
        self._registry = registry
        self._tasks: list[asyncio.Task[None]] = []
        self.api: KubernetesApi
        self.jobs: Mirror
        self.pods: Mirror
        self.slices: Mirror

    @property
    def rewards(self) -> Mapping[str, tuple[str, ...]]:
        return ready_addresses(self.slices.objects.values(), "reward")

    @property
    def pools(self) -> Collection[str] | None:
        return ready_addresses(self.slices.objects.values(), "rollout").keys()

    def shortage(self, component: str, name: str) -> str:
        if shortage := pods.shortage(self.pods_of(component, name)):
            return shortage
        gone = component == "rollout" and name not in (self.pools or ())
        return f"release {self._release} has no such pool any more" if gone else ""

    def pods_of(self, component: str, name: str) -> list[Object]:
        wanted = (component, name)
        return [pod for pod in self.pods.objects.values() if named(pod) == wanted]

    async def start(self) -> None:
        """Raises ValueError without a way to the API server, Unavailable when the lists do not come."""
        self.api = await connect(self._namespace)
        release = f"{INSTANCE}={self._release}"
        self.slices = Mirror(self.api, ENDPOINT_SLICES, f"{release},{COMPONENT} in (rollout,reward)")
        self.pods = Mirror(self.api, PODS, f"{release},{COMPONENT} in (rollout,reward,trainer)")
        self.jobs = Mirror(self.api, JOBS, f"{release},{COMPONENT}=trainer")
        mirrors = (self.slices, self.pods, self.jobs)
        self._tasks = [asyncio.create_task(mirror.run(), name="kubernetes mirror") for mirror in mirrors]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*(mirror.synced.wait() for mirror in mirrors))
        except TimeoutError:
            why = "; ".join({mirror.problem for mirror in mirrors if mirror.problem}) or "no answer"
            await self.stop()
            log.error("could not list the release given by --kubernetes %s: %s", self._release, why)
            raise Unavailable(f"--kubernetes {self._release}: {why}") from None
        self._registry.register(self)

    async def stop(self) -> None:
        await end(self._tasks)
        await self.api.close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gauges for Prometheus. A pool or reward without trouble shows 0."""
        gauge = GaugeMetricFamily(
            "flowfleet_unschedulable_pods",
            "Pods for which the scheduler has found no node",
            labels=["component", "name"],
        )
        counts = Counter(named(pod) for pod in self.pods.objects.values() if pods.unschedulable(pod))
        known = {("rollout", name) for name in self.pools or ()} | {("reward", name) for name in self.rewards}
        for component, name in sorted(known | counts.keys()):
            gauge.add_metric([component, name], counts[component, name])
        yield gauge
        stale = GaugeMetricFamily(
            "flowfleet_kubernetes_stale_seconds",
            "Since when objects of the cluster cannot be followed; 0 while they are",
            labels=["kind"],
        )
        for mirror in (self.slices, self.pods, self.jobs):
            stale.add_metric([mirror.kind], mirror.stale_s)
        yield stale

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing is collected at registration."""
        return iter(())


def named(item: Object) -> tuple[str, str]:
    """Component and name of a release's object, by its labels."""
    labels = item["metadata"].get("labels") or {}
    component = labels.get(COMPONENT, "")
    return component, labels.get(NAME_LABEL.get(component, ""), "")


def ready_addresses(slices: Iterable[Object], component: str) -> dict[str, tuple[str, ...]]:
    """Name → addresses of the pods that are ready and not about to end; () for what has none. A Service may have
    several slices, and one for each kind of address: a pod counts once."""
    found: dict[str, dict[str, str]] = {}
    for part in sorted(slices, key=lambda part: (part.get("addressType", ""), part["metadata"]["name"])):
        kind, name = named(part)
        if kind == component and name:
            addresses = found.setdefault(name, {})
            for pod, address in _endpoints(part):
                addresses.setdefault(pod, address)
    return {name: tuple(sorted(addresses.values())) for name, addresses in found.items()}


def _endpoints(part: Object) -> Iterator[tuple[str, str]]:
    """(pod, host:port) of a slice. Conditions that are not set count as the API says: ready, not terminating."""
    port = _port(part)
    for endpoint in part.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        if conditions.get("ready") is False or conditions.get("terminating") is True:
            continue
        for address in endpoint.get("addresses", ())[:1]:
            yield (endpoint.get("targetRef") or {}).get("uid", address), format_address(address, port)


def _port(part: Object) -> int:
    """The one named grpc, else the only one, else the fleet's."""
    ports = {item.get("name") or "": item["port"] for item in part.get("ports") or () if item.get("port")}
    if len(ports) == 1:
        return int(next(iter(ports.values())))
    return int(ports.get(PORT_NAME, PORT))
