"""Values that the schema refuses, and how it says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from services.controller.limits import Limits
from tests.deploy.conftest import CHART, helm

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    ("setting", "place", "what"),
    [
        ("bogus=1", "", "bogus"),
        ("controller.bogus=1", "/controller", "bogus"),
        ('pools=[{"name":"a","bogus":1}]', "/pools/0", "bogus"),
        ('pools=[{"name":"a","adapterSlots":-1}]', "/pools/0/adapterSlots", "minimum"),
        ('pools=[{"name":"a","autoscaling":{"min":1}}]', "/pools/0/autoscaling", "min"),
        ('rewards=[{"name":"a","scorer":"ocr","accelerator":1}]', "/rewards/0", "accelerator"),
        ('rewards=[{"name":"a","scorer":"ocr","accelerators":-1}]', "/rewards/0/accelerators", "minimum"),
        ('rewards=[{"name":"a","scorer":"ocr","settings":[1]}]', "/rewards/0/settings", "array"),
        ('rewards=[{"name":"a","scorer":"ocr","files":{"settings.json":"{}"}}]', "/rewards/0/files", "not"),
        ('rewards=[{"name":"a","scorer":"ocr","files":{"a/b":""}}]', "/rewards/0/files", "a/b"),
        ('rewards=[{"name":"a","scorer":"ocr","judges":"q"}]', "/rewards/0/judges", "string"),
        ('rewards=[{"name":"a","args":["x"],"port":70000}]', "/rewards/0/port", "maximum"),
        ('rewards=[{"name":"a","scorer":"http","egress":[{"port":443}]}]', "/rewards/0/egress/0", "port"),
        ('judges=[{"model":"/m"}]', "/judges/0", "name"),
        ('judges=[{"name":"my_judge","model":"/m"}]', "/judges/0/name", "pattern"),
        ('judges=[{"name":"q","model":"/m","autoscaling":{}}]', "/judges/0", "autoscaling"),
        ('judges=[{"name":"q","model":"/m","maxModelLen":0}]', "/judges/0/maxModelLen", "minimum"),
        ("tls.certManager.issuerRef.nome=1", "/tls/certManager/issuerRef", "nome"),
        ("networkPolicy.egress.redis=[]", "/networkPolicy/egress", "redis"),
        ("controller.resources.requests.cpu=[]", "/controller/resources/requests/cpu", "array"),
        ('controller.replicas="2"', "/controller/replicas", "string"),
        ("controller.replicas=-1", "/controller/replicas", "minimum"),
        ("trainer.drainSeconds=3601", "/trainer/drainSeconds", "maximum"),
        ("keda.enabled=1", "/keda/enabled", "number"),
        ('controller.logLevel="loud"', "/controller/logLevel", "'info'"),
        ('accelerator.backend="mpi"', "/accelerator/backend", "'nccl'"),
        ("controller.nodeSelector.gpu=true", "/controller/nodeSelector/gpu", "boolean"),
        ('pools=[{"name":"Big_Pool"}]', "/pools/0/name", "pattern"),
        ('pools=[{"engine":"diffusers"}]', "/pools/0", "name"),
        ('rewards=[{"name":"a","scorer":"b","extraArgs":"--x"}]', "/rewards/0/extraArgs", "string"),
        ('volumes=[{"name":"a","hostPath":{"path":"/"}}]', "/volumes/0", "not"),
        ('images.tag="latest"', "/images/tag", "not"),
        ('images.trainer="flowfleet-trainer@sha256:5f"', "/images/trainer", "pattern"),
        ("podSecurity.runAsUser=0", "/podSecurity/runAsUser", "minimum"),
        ('redis.persistence.size="ten"', "/redis/persistence/size", "pattern"),
        ('env=[{"name":"A","valu":"b"}]', "/env/0", "valu"),
        ('traces.endpoint="collector:4317"', "/traces/endpoint", "pattern"),
        ('traces.protocol="http/json"', "/traces/protocol", "'grpc'"),
        ('traces.url="https://jaeger/trace/"', "/traces/url", "pattern"),
    ],
)
def test_the_error_names_the_key(setting: str, place: str, what: str) -> None:
    done = helm("template", "fleet", str(CHART), "--set-json", setting)
    assert done.returncode != 0
    assert f"at '{place}'" in done.stderr, done.stderr
    assert what in done.stderr


def test_every_object_of_the_schema_is_closed() -> None:
    """But those whose keys are the user's or Kubernetes's."""
    opened = {path for path, node in _objects(SCHEMA, "") if "properties" in node and not _is_closed(node)}
    assert opened == {"/definitions/volumes/items", "/definitions/initContainers/items"}


def test_the_schema_has_every_value_and_no_other() -> None:
    assert _keys(VALUES, SCHEMA) == []


def test_a_pool_may_set_what_the_defaults_set() -> None:
    for defaults, items, own in (
        ("rollout", "pools", {"name"}),
        ("reward", "rewards", {"name", "scorer"}),
        ("judge", "judges", {"name"}),
    ):
        one = SCHEMA["properties"][defaults]["properties"]
        many = SCHEMA["properties"][items]["items"]["properties"]
        assert {key: value for key, value in many.items() if key not in own} == one


def test_every_value_has_a_comment() -> None:
    commented = set(_commented((CHART / "values.yaml").read_text()))
    assert list(_undescribed(VALUES, commented)) == []


def _commented(text: str) -> Iterator[str]:
    """Paths of the values that have a comment of helm-docs, `# -- …`, above them."""
    path: list[str] = []
    described = False
    for line in text.splitlines():
        if key := re.match(r"( *)([A-Za-z]\w*):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if described:
                yield ".".join(path)
        described = line.strip().startswith("#") and (described or line.strip().startswith("# --"))


def _undescribed(values: dict[str, Any], commented: set[str], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        path = prefix + name
        if path in commented:
            continue
        if isinstance(value, dict) and value:
            yield from _undescribed(value, commented, f"{path}.")
        else:
            yield path


def _is_closed(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties") is False


def _objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for key, value in node.items():
            yield from _objects(value, f"{path}/{key}")


def _keys(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    """Paths that values.yaml or the schema has alone."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema or schema.get("type") != "object" or not _is_closed(schema) or not values:
        return []
    if path.endswith((".resources", ".issuerRef", ".affinity")):
        return []
    known = schema["properties"].keys() - {"global"}
    wrong = [f"{path}.{key}" for key in known ^ values.keys()]
    for key in known & values.keys():
        if isinstance(values[key], dict):
            wrong += _keys(values[key], schema["properties"][key], f"{path}.{key}")
    return wrong


def test_the_schema_knows_every_limit_of_the_controller() -> None:
    assert SCHEMA["properties"]["controller"]["properties"]["limits"]["properties"].keys() == Limits.model_fields.keys()
