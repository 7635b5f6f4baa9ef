"""Which pods may speak to which: the policies, evaluated as a network plugin does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.conftest import ALL, FULLNAME, Object, Rendered, selects

COMPONENTS = ("controller", "rollout", "reward", "trainer", "redis", "test")
OWN = {"kubernetes.io/metadata.name": "ns"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
KEDA = {"kubernetes.io/metadata.name": "keda"}
DNS = {"kubernetes.io/metadata.name": "kube-system"}
ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}

FLOWS = {
    ("controller", "redis", 6379),
    ("controller", "reward", 7000),
    ("controller", "rollout", 7000),
    ("controller", "trainer", 7000),
    ("controller", "trainer", 7100),
    ("controller", "trainer", 7107),
    ("rollout", "redis", 6379),
    ("trainer", "redis", 6379),
    ("trainer", "reward", 7000),
    ("test", "controller", 8470),
    *((a, b, port) for a in ("rollout", "trainer") for b in ("rollout", "trainer") for port in (7000, 29500, 45678)),
}
"""Between pods of the release; any other is refused."""
PORTS = (22, 443, 6379, 7000, 7001, 7100, 7107, 7116, 8470, 8471, 9470, 29500, 45678)

Peer = tuple[dict[str, str], dict[str, str]]
"""Labels of a pod and of its namespace."""


class Network:
    def __init__(self, rendered: Rendered) -> None:
        self._policies = [doc["spec"] for doc in rendered.kind("NetworkPolicy")]
        self.labels: dict[str, Object] = {}
        """Labels by component, and by name for rewards and judges, such as reward-ocr."""
        for _, pod in rendered.pods():
            labels = pod["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            own = labels.get(f"flowfleet.io/{component}", "")
            self.labels[component] = self.labels[f"{component}-{own}"] = labels

    def lets(self, source: str, target: str, port: int) -> bool:
        """From a pod of the release to another: out of the first and into the second."""
        return self.lets_out(source, (self.labels[target], OWN), port) and self.lets_in(
            (self.labels[source], OWN), target, port
        )

    def lets_in(self, source: Peer, target: str, port: int) -> bool:
        return self._passes("Ingress", "ingress", "from", self.labels[target], source, port)

    def lets_out(self, source: str, target: Peer, port: int) -> bool:
        return self._passes("Egress", "egress", "to", self.labels[source], target, port)

    def lets_out_to_address(self, source: str, cidr: str, port: int) -> bool:
        rules = self._rules("Egress", "egress", self.labels[source])
        return any(
            peer.get("ipBlock", {}).get("cidr") == cidr
            for rule in rules
            if _has_port(rule, port)
            for peer in rule["to"]
        )

    def _passes(self, kind: str, rules: str, peers: str, labels: Object, other: Peer, port: int) -> bool:
        found = list(self._rules(kind, rules, labels))
        return any(_is_peer(peer, other) for rule in found if _has_port(rule, port) for peer in rule[peers])

    def _rules(self, kind: str, rules: str, labels: Object) -> Iterator[Object]:
        """Rules of the policies that apply to a pod; at least one must exist, else everything would pass."""
        holding = [p for p in self._policies if kind in p["policyTypes"] and selects(p["podSelector"], labels)]
        assert holding, f"{kind} of {labels} is not denied"
        for policy in holding:
            yield from policy.get(rules, ())


def _has_port(rule: Any, port: int) -> bool:
    return any(item["port"] <= port <= item.get("endPort", item["port"]) for item in rule["ports"])


def _is_peer(peer: Any, other: Peer) -> bool:
    pod, namespace = other
    if "ipBlock" in peer:
        return False
    in_namespace = selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else namespace == OWN
    return in_namespace and selects(peer.get("podSelector", {}), pod)


@pytest.mark.parametrize("name", ["nvidia", "cpu", "ascend", "mtls", "no-keda"])
def test_pods_of_the_release_speak_as_they_must_and_not_otherwise(name: str) -> None:
    network = Network(Rendered(name, "networkPolicy.restFrom=[]"))
    passing = {(a, b, port) for a in COMPONENTS for b in COMPONENTS for port in PORTS if network.lets(a, b, port)}
    wanted = {(a, b, port) for a, b, port in FLOWS}
    transfers = {(a, b, p) for a in ("rollout", "trainer") for b in ("rollout", "trainer") for p in PORTS if p >= 1024}
    assert passing == wanted | transfers


def test_a_highly_available_redis_is_asked_at_its_sentinels_and_asks_itself() -> None:
    network = Network(Rendered("ha-redis"))
    ports = (*PORTS, 26379)
    passing = {
        (a, b, p) for a in COMPONENTS for b in COMPONENTS for p in ports if "redis" in (a, b) and network.lets(a, b, p)
    }
    callers = ("controller", "rollout", "trainer", "redis")
    assert passing == {(caller, "redis", port) for caller in callers for port in (6379, 26379)}
    assert network.lets_out("redis", ({}, DNS), 53)


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", ALL)
def test_nobody_comes_in_from_elsewhere(name: str, component: str) -> None:
    rendered = Rendered(name)
    if component == "redis" and not rendered.kind("StatefulSet"):
        return
    network = Network(rendered)
    assert not any(network.lets_in(({}, ELSEWHERE), component, port) for port in PORTS)


def test_prometheus_reaches_metrics_alone() -> None:
    network = Network(Rendered("nvidia"))
    reached = {(c, port) for c in COMPONENTS for port in PORTS if network.lets_in(({}, MONITORING), c, port)}
    assert reached == {(component, 9470) for component in ("controller", "rollout", "reward", "trainer")}


def test_keda_reaches_the_scaler_alone() -> None:
    network = Network(Rendered("nvidia"))
    reached = {(c, port) for c in COMPONENTS for port in PORTS if network.lets_in(({}, KEDA), c, port)}
    assert reached == {("controller", 8471)}
    without = Network(Rendered("no-keda"))
    assert not any(without.lets_in(({}, KEDA), c, port) for c in COMPONENTS for port in PORTS)


def test_names_are_asked_for_by_those_who_use_names() -> None:
    network = Network(Rendered("nvidia"))
    asking = {component for component in COMPONENTS if network.lets_out(component, ({}, DNS), 53)}
    assert asking == {"controller", "rollout", "trainer", "test"}
    assert asking == {component for component in COMPONENTS if network.lets_out(component, ({}, DNS), 5353)}
    calling = Network(Rendered("everything"))  # its rewards call an object store, by name
    assert calling.lets_out("reward", ({}, DNS), 53)
    assert not calling.lets_out("redis", ({}, DNS), 53)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.monitoring:4317", 4317),
        ("https://collector.monitoring:4318/v1/traces", 4318),
        ("https://collector.monitoring", 443),
        ("http://collector.monitoring/otlp", 80),
    ],
)
def test_traces_go_to_their_collector_alone(endpoint: str, port: int) -> None:
    ports, exporting = {*PORTS, 80, 4317, 4318}, ("controller", "rollout", "reward", "trainer")
    network = Network(Rendered("nvidia", f'traces.endpoint="{endpoint}"'))
    reached = {(c, p) for c in COMPONENTS for p in ports if network.lets_out(c, ({}, MONITORING), p)}
    assert reached == {(component, port) for component in exporting}
    assert network.lets_out("reward", ({}, DNS), 53)
    without = Network(Rendered("nvidia"))
    assert not any(without.lets_out(c, ({}, MONITORING), p) for c in COMPONENTS for p in ports)


def test_the_api_server_is_for_the_controller() -> None:
    network = Network(Rendered("everything"))
    assert [c for c in COMPONENTS if network.lets_out_to_address(c, "10.0.0.1/32", 443)] == ["controller"]
    peer: Peer = ({}, {"kubernetes.io/metadata.name": "default"})
    assert [c for c in COMPONENTS if network.lets_out(c, peer, 443)] == ["controller"]


def test_no_policy_lets_the_controller_out_to_everywhere(any_profile: Rendered) -> None:
    blocks = [
        peer["ipBlock"]["cidr"]
        for policy in any_profile.kind("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert "10.0.0.1/32" in blocks
    assert not {"0.0.0.0/0", "::/0"} & set(blocks)


def test_an_external_redis_and_an_object_store_are_reached_by_address() -> None:
    network = Network(Rendered("external-redis"))
    reached = [c for c in COMPONENTS if c in network.labels and network.lets_out_to_address(c, "10.20.0.0/16", 6380)]
    assert reached == ["controller", "rollout", "trainer"]
    peer: Peer = ({}, {"kubernetes.io/metadata.name": "redis"})
    assert reached == [c for c in COMPONENTS if c in network.labels and network.lets_out(c, peer, 6380)]
    network = Network(Rendered("everything"))
    stores = [c for c in COMPONENTS if network.lets_out_to_address(c, "10.30.0.0/16", 443)]
    assert stores == ["controller", "rollout", "reward", "trainer"]


def test_rest_is_for_those_whom_the_values_name() -> None:
    program: Peer = ({"app": "notebook"}, OWN)
    assert Network(Rendered("nvidia")).lets_in(program, "controller", 8470)
    assert not Network(Rendered("nvidia")).lets_in(program, "controller", 9470)
    ingress = Network(Rendered("everything"))
    assert not ingress.lets_in(program, "controller", 8470)
    assert ingress.lets_in(({}, {"kubernetes.io/metadata.name": "ingress-nginx"}), "controller", 8470)


def test_policies_hold_for_the_pods_of_the_release_alone(any_profile: Rendered) -> None:
    other = {"app.kubernetes.io/name": "flowfleet", "app.kubernetes.io/instance": "another"}
    for policy in any_profile.kind("NetworkPolicy"):
        assert policy["metadata"]["name"].startswith(FULLNAME)
        assert not any(
            selects(policy["spec"]["podSelector"], {**other, "app.kubernetes.io/component": component})
            for component in COMPONENTS
        )


def test_policies_can_be_left_to_others() -> None:
    assert Rendered("nvidia", "networkPolicy.enabled=false").kind("NetworkPolicy") == []


# -- rewards that call others, and judges --------------------------------------------------------------------------


def test_a_judge_is_for_the_rewards_that_name_it() -> None:
    network = Network(Rendered("everything"))
    pods = [name for name in network.labels if name not in COMPONENTS]
    reached = {
        (a, b, p) for a in pods for b in ("judge-qwen", "judge-small") for p in (*PORTS, 8000) if network.lets(a, b, p)
    }
    assert reached == {("reward-counting", "judge-qwen", 8000)}
    strangers: list[Peer] = [({}, OWN), ({}, MONITORING), ({}, ELSEWHERE)]
    assert not any(network.lets_in(peer, "judge-qwen", 8000) for peer in strangers)


def test_a_judge_calls_nobody() -> None:
    network = Network(Rendered("everything"))
    assert not any(
        network.lets_out("judge-qwen", (network.labels[name], OWN), port)
        for name in network.labels
        for port in (*PORTS, 8000)
    )
    assert not any(network.lets_out("judge-qwen", ({}, DNS), port) for port in (53, 5353, 443))


def test_egress_of_one_reward_is_its_own() -> None:
    rules = '[{"to":[{"ipBlock":{"cidr":"10.40.0.0/16"}}],"ports":[{"port":443}]}]'
    rewards = (
        f'[{{"name":"a","scorer":"http","egress":{rules}}},'
        '{"name":"b","scorer":"ocr"},{"name":"c","scorer":"vlm","judges":["q"]}]'
    )
    network = Network(Rendered("nvidia", f"rewards={rewards}", 'judges=[{"name":"q","model":"/m"}]'))
    pods = ("reward-a", "reward-b", "reward-c")
    assert [name for name in pods if network.lets_out_to_address(name, "10.40.0.0/16", 443)] == ["reward-a"]
    assert [name for name in pods if network.lets_out(name, ({}, DNS), 53)] == ["reward-a", "reward-c"]
    assert [name for name in pods if network.lets(name, "judge-q", 8000)] == ["reward-c"]


def test_a_reward_of_ones_own_is_called_on_its_port() -> None:
    network = Network(Rendered("everything"))
    assert network.lets("controller", "reward-colour", 50051)
    assert network.lets("controller", "reward-ocr", 7000)
    assert not Network(Rendered("nvidia")).lets("controller", "reward-ocr", 50051)
    assert not network.lets("rollout", "reward-colour", 50051)
