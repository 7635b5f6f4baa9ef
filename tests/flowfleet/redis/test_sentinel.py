"""Clients follow the Sentinels' failover."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.redis.client import connect, connect_sync
from flowfleet.redis.sentinel import parse
from tests.flowfleet.sentinels import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    started = Group(tmp_path / "group")
    yield started
    started.kill()


@pytest.mark.long
async def test_a_client_goes_on_with_the_new_primary(group: Group) -> None:
    client, threads = connect(group.url), connect_sync(group.url)
    await client.set("before", "1")
    assert await client.wait(2, 2000) == 2
    assert threads.get("before") == b"1"
    group.primary.process.kill()
    await client.set("after", "1")
    assert (await client.get("before"), await client.get("after"), threads.get("after")) == (b"1", b"1", b"1")
    port = (await client.info("server"))["tcp_port"]
    assert port in [replica.port for replica in group.replicas]
    await client.aclose()
    threads.close()


def test_the_url_names_sentinels_group_and_database() -> None:
    url = parse("rediss+sentinel://controller:p%40ss@a:1,b,c:3/fleet/2?sentinel_password=own")
    assert url.sentinels == (("a", 1), ("b", 26379), ("c", 3))
    assert (url.name, url.tls) == ("fleet", True)
    assert url.connection == {"db": 2, "username": "controller", "password": "p@ss"}
    assert url.asking == {"ssl": True, "password": "own"}


def test_the_url_has_a_user_of_the_sentinels_and_settings_of_tls() -> None:
    query = "sentinel_username=rollout&sentinel_password=own&ssl_ca_certs=/t/ca.crt&ssl_check_hostname=False"
    url = parse(f"rediss+sentinel://rollout:own@a/fleet/0?{query}")
    assert url.asking == {"ssl": True, "username": "rollout", "password": "own"}
    tls = {"ssl_ca_certs": "/t/ca.crt", "ssl_check_hostname": False}
    assert {**url.connection, **tls} == url.connection
    assert {**url._asking({"ssl_ca_certs": "of the environment"}), **tls} == url._asking({})
    with pytest.raises(ValueError, match="db is not a setting"):
        parse("redis+sentinel://a/fleet/0?db=2")


@pytest.mark.parametrize(
    "url", ["redis+sentinel://:secret@a:1", "redis+sentinel://:secret@a:x/n", "redis+sentinel://:secret@/n"]
)
def test_a_malformed_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT") as caught:
        connect(url)
    assert "secret" not in str(caught.value)
