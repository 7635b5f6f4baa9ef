"""Pools and rewards from EndpointSlices, and how a mirror follows the API server through what can break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from flowfleet.errors import Unavailable
from services.controller.platforms.kubernetes import mirror as kubernetes_mirror
from services.controller.platforms.kubernetes.api import PODS, Gone
from services.controller.platforms.kubernetes.directory import ready_addresses
from services.controller.platforms.kubernetes.mirror import Mirror
from tests.waiting import until


def part(name: str, *endpoints: dict[str, Any], kind: str = "IPv4", slice_name: str = "s", **parts: Any) -> Any:
    labels = {"app.kubernetes.io/component": "reward", "flowfleet.io/reward": name}
    ports = [{"name": "grpc", "port": 7000}, {"name": "metrics", "port": 9470}]
    return {
        "metadata": {"name": slice_name, "labels": labels},
        "addressType": kind,
        "ports": ports,
        "endpoints": list(endpoints) or None,
        **parts,
    }


def endpoint(address: str, uid: str = "", **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"uid": uid or address}}


def test_ready_endpoints_are_addresses_and_what_has_none_is_known() -> None:
    found = ready_addresses(
        [
            part("ocr", endpoint("10.0.0.2", ready=True), endpoint("10.0.0.1"), endpoint("10.0.0.3", ready=False)),
            part("jpeg", endpoint("10.0.0.4", ready=True, serving=True, terminating=True)),
            part("aesthetic"),
        ],
        "reward",
    )
    assert found == {"ocr": ("10.0.0.1:7000", "10.0.0.2:7000"), "jpeg": (), "aesthetic": ()}
    assert ready_addresses([part("ocr", endpoint("10.0.0.2"))], "rollout") == {}


def test_a_pod_counts_once_whatever_slices_it_is_in() -> None:
    slices = [
        part("ocr", endpoint("fd00::1", "a", ready=True), endpoint("fd00::2", "b", ready=True), kind="IPv6"),
        part("ocr", endpoint("10.0.0.1", "a", ready=True), slice_name="s1"),
        part("ocr", endpoint("10.0.0.1", "a", ready=True), slice_name="s2"),
    ]
    assert ready_addresses(slices, "reward") == {"ocr": ("10.0.0.1:7000", "[fd00::2]:7000")}


@pytest.mark.parametrize(
    ("ports", "port"),
    [
        ([{"name": "grpc", "port": 7100}, {"name": "metrics", "port": 9470}], 7100),
        ([{"name": "", "port": 7200}], 7200),
        ([{"port": 7300}], 7300),
        ([{"name": "a", "port": 1}, {"name": "b", "port": 2}], 7000),
        (None, 7000),
    ],
)
def test_the_port_is_the_one_named_grpc_or_the_only_one(ports: Any, port: int) -> None:
    assert ready_addresses([part("ocr", endpoint("a"), ports=ports)], "reward") == {"ocr": (f"a:{port}",)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([True, False, None]), st.booleans()), max_size=8))
def test_exactly_those_that_are_ready_and_stay(states: list[tuple[str, bool | None, bool]]) -> None:
    slices = [
        part(name, endpoint(f"10.0.0.{k}", ready=ready, terminating=ends), slice_name=f"s{k}")
        for k, (name, ready, ends) in enumerate(states)
    ]
    found = ready_addresses(slices, "reward")
    assert found.keys() == {name for name, _, _ in states}
    wanted = {
        (name, f"10.0.0.{k}:7000") for k, (name, ready, ends) in enumerate(states) if ready is not False and not ends
    }
    assert {(name, address) for name, addresses in found.items() for address in addresses} == wanted


# -- following --------------------------------------------------------------------------------------------------------


def item(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class ScriptedApi:
    """Answers lists and watches from a script; keeps the versions from which it was asked to watch."""

    def __init__(self, lists: list[Any], watches: list[list[Any]]) -> None:
        self.lists, self.watches, self.versions = lists, watches, list[str]()

    async def list(self, resource: Any, selector: str) -> Any:
        answer = self.lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        items, version = answer
        return items, str(version)

    async def watch(self, resource: Any, selector: str, version: str) -> AsyncIterator[Any]:
        self.versions.append(version)
        if not self.watches:
            await asyncio.Event().wait()
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


async def follow(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that the mirror has at the end of the script."""
    monkeypatch.setattr(kubernetes_mirror, "MIN_DELAY_S", 0.01)
    async with asyncio.timeout(10):
        mirror = Mirror(api, PODS, "a=b")  # type: ignore[arg-type]
        task = asyncio.create_task(mirror.run())
        await mirror.synced.wait()
        await until(lambda: not (api.lists or api.watches))
        await asyncio.sleep(0.05)
        task.cancel()
        return set(mirror.objects)


async def test_a_watch_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [("ADDED", item("b", 5)), ("DELETED", item("a", 6)), ("BOOKMARK", item("", 9))]
    api = ScriptedApi([([item("a", 1)], 3)], [first, [("MODIFIED", item("c", 12))]])
    assert await follow(api, monkeypatch) == {"b", "c"}
    assert api.versions == ["3", "9", "12"]


async def test_one_that_is_too_old_begins_with_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi([([item("a", 1)], 3), ([item("d", 20)], 21)], [[("ADDED", item("b", 5)), Gone("too old")]])
    assert await follow(api, monkeypatch) == {"d"}
    assert api.versions == ["3", "21"]


async def test_one_that_breaks_keeps_what_it_has_until_the_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Unavailable("no answer")
    api = ScriptedApi([away, ([item("a", 1)], 3), away, away, ([item("e", 30)], 31)], [[away]])
    assert await follow(api, monkeypatch) == {"e"}
    assert api.versions == ["3", "31"]


async def test_whatever_it_meets_it_goes_on_and_tells_since_when_it_does_not_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = ScriptedApi([KeyError("items"), ([item("a", 1)], 3), ([item("e", 9)], 10)], [[("ADDED", {"metadata": {}})]])
    assert await follow(api, monkeypatch) == {"e"}
    away = Unavailable("no answer")
    mirror = Mirror(ScriptedApi([([], 3), *[away] * 50], [[away]]), PODS, "a=b")  # type: ignore[arg-type]
    assert mirror.stale_s == 0
    begun = time.monotonic()
    task = asyncio.create_task(mirror.run())
    await mirror.synced.wait()
    await until(lambda: mirror.stale_s > 0)
    assert mirror.stale_s <= time.monotonic() - begun
    assert (mirror.kind, mirror.problem) == ("pods", "no answer")
    task.cancel()


async def _token(settings: Configuration) -> Any:
    return await settings.get_api_key_with_prefix("BearerToken")


async def test_a_rotated_token_is_taken_up(tmp_path: Path) -> None:
    """The client's own, on which a controller that runs for longer than an hour depends."""
    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("one")
    certificate.write_text("c")
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    loader, settings = InClusterConfigLoader(str(token), str(certificate), environ=env), Configuration()
    loader.load_and_set(settings)
    assert await _token(settings) == "bearer one"
    token.write_text("two")
    loader.token_expires_at -= loader._token_refresh_period
    assert await _token(settings) == "bearer two"
