"""Renderings without a cluster to ask, as `helm template` and Argo CD make them."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.deploy.conftest import CHART, FULLNAME, PROFILES, Rendered, helm, values_of


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_renders_without_a_cluster_and_twice_alike(profile: str) -> None:
    """A network that could not be looked up is a text, so that the API server says which value to set."""
    first, second = (helm("template", "fleet", str(CHART), *values_of(profile)).stdout for _ in range(2))
    assert first == second
    policies = [doc for doc in yaml.safe_load_all(first) if doc and doc["kind"] == "NetworkPolicy"]
    (policy,) = (doc for doc in policies if doc["metadata"]["name"] == f"{FULLNAME}-controller")
    networks = [
        peer["ipBlock"]["cidr"] for rule in policy["spec"]["egress"] for peer in rule["to"] if "ipBlock" in peer
    ]
    told = "10.96.0.1/32" if profile == "gitops" else "set networkPolicy.apiServer.cidrs: helm could ask no cluster"
    assert networks == [told]


def test_passwords_that_cannot_be_kept_are_refused_by_the_api_server() -> None:
    """Rendered without a cluster the Secrets are alike each time, and have a label that no API server takes."""
    first, second = (Rendered("nvidia", *labels).kind("Secret") for labels in ((), ("commonLabels={}",)))
    assert first == second
    said = [doc["metadata"]["labels"]["flowfleet.io/refused"] for doc in first]
    assert [words.split(":")[0] for words in said] == [
        "set secrets.apiKey.existingSecret", "set redis.auth.existingSecret",
    ]  # fmt: skip
    assert all(len(words) > 63 for words in said)
    assert "flowfleet.io/refused" not in json.dumps(Rendered("gitops").objects)
