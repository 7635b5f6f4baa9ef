"""The scripts of the chart's highly available Redis, with real servers and Sentinels."""

from __future__ import annotations

import shutil
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from flowfleet.redis.client import connect_sync
from tests.deploy.redis_pods import OPERATOR, PASSWORDS, RedisPod, RedisPods
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs redis-cli: install Redis 7"),
]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisPods]:
    started = RedisPods(tmp_path_factory.mktemp("redis"))
    yield started
    started.kill()


@pytest.fixture
def client(pods: RedisPods) -> Iterator[redis.Redis]:
    """Connects like a controller; the pods are ready, and the primary has both replicas."""
    wait_until(pods.ready, 60)
    primary = pods.primary
    wait_until(lambda: primary.client().info("replication")["min_slaves_good_slaves"] == 2, 60)
    with connect_sync(pods.url) as made:
        yield made


class Writer:
    """Writes without a pause until it is left, and counts what was acknowledged."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.acknowledged, self._ends = client, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self.client.rpush("ff:test:written", self.acknowledged)
                self.acknowledged += 1
            except redis.RedisError:
                time.sleep(0.05)

    def __enter__(self) -> Writer:
        self.client.delete("ff:test:written")
        self._thread.start()
        wait_until(lambda: self.acknowledged > 100)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def lost(self) -> set[int]:
        return set(range(self.acknowledged)) - {int(item) for item in self.client.lrange("ff:test:written", 0, -1)}


def test_pods_find_each_other_and_a_write_needs_a_replica(pods: RedisPods, client: redis.Redis) -> None:
    assert pods.primary is pods.pods[0]
    client.set("ff:a:b", "1")
    assert client.wait(2, 5000) == 2
    settings = pods.primary.client().config_get("*")
    assert (settings["min-replicas-to-write"], settings["min-replicas-max-lag"]) == ("1", "10")
    assert (pods.primary.folder / "data" / "sentinel.conf").stat().st_mode & 0o077 == 0


def test_a_service_may_ask_a_sentinel_and_change_nothing(pods: RedisPods) -> None:
    for kind, password in PASSWORDS.items():
        sentinel: Any = pods.pods[0].client(26379, kind, password)
        assert sentinel.execute_command("SENTINEL", "get-master-addr-by-name", "flowfleet")
        for words in ("failover flowfleet", "set flowfleet quorum 1", "monitor evil 127.0.0.1 6379 1", "reset *"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                sentinel.execute_command("SENTINEL", *words.split())
    with pytest.raises(redis.exceptions.AuthenticationError):
        pods.pods[0].client(26379, "default", "x" + OPERATOR).ping()


def test_a_primary_that_leaves_hands_over_and_loses_nothing(pods: RedisPods, client: redis.Redis) -> None:
    before = pods.primary
    with Writer(client) as writer:
        assert before.run("leave.sh") == 0
        assert before.role == "slave"
        before.kill("start", "sentinel")
        acknowledged = writer.acknowledged
        wait_until(lambda: writer.acknowledged > acknowledged + 100)
    assert writer.lost() == set()
    before.start()
    wait_until(pods.ready, 60)
    assert before.role == "slave"


def priorities(pods: list[RedisPod]) -> set[int]:
    """Whether replicas may be elected, as far as the Sentinels of these pods know."""
    answers = [pod.client(26379).sentinel_slaves("flowfleet") for pod in pods]
    return {replica["slave-priority"] for answer in answers for replica in answer}


@pytest.fixture
def refusing(pods: RedisPods) -> Iterator[list[RedisPod]]:
    """The replicas, which their Sentinels know as not to be elected; and which do not elect of themselves, for a
    primary whose writes pause seems down after a while."""
    primary = pods.primary
    replicas = [pod for pod in pods.pods if pod is not primary]
    for pod in replicas:
        pod.client(26379).sentinel_set("flowfleet", "down-after-milliseconds", 60_000)
        pod.client().config_set("replica-priority", 0)
    wait_until(lambda: priorities(replicas) == {0}, 60)
    yield replicas
    for pod in replicas:
        pod.client(26379).sentinel_set("flowfleet", "down-after-milliseconds", 1000)


def test_a_primary_leaves_before_the_sentinels_know_whom_to_elect(
    client: redis.Redis, pods: RedisPods, refusing: list[RedisPod]
) -> None:
    """They learn within ten seconds only that a replica has the data and may be elected."""
    before = pods.primary
    for pod in refusing:
        assert pod.run("probe.sh", "ready") == 0
    assert before.run("leave.sh") == 0
    assert before.role == "slave"


def test_a_primary_that_nobody_can_follow_says_so(
    client: redis.Redis, pods: RedisPods, refusing: list[RedisPod]
) -> None:
    before = pods.primary
    assert before.run("leave.sh") == 1
    assert "no other one was elected" in before.log()
    assert before.role == "master"
    assert before.client().client_unpause()  # it did not end as it does in a pod


def test_a_killed_primary_comes_back_with_its_file_or_is_replaced(pods: RedisPods, client: redis.Redis) -> None:
    before = pods.primary
    with Writer(client) as writer:
        before.kill("start")
        before.start("start")
        acknowledged = writer.acknowledged
        wait_until(lambda: writer.acknowledged > acknowledged + 100, 60)
    wait_until(pods.ready, 60)
    lost = writer.lost()  # the last ones before the kill, which no replica had; none where it came back in time
    assert lost == set(range(min(lost, default=0), max(lost, default=-1) + 1))
    assert not lost or writer.acknowledged - 1 not in lost


def test_a_primary_whose_disk_is_lost_does_not_empty_its_replicas(pods: RedisPods, client: redis.Redis) -> None:
    client.set("ff:kept", "1")
    assert client.wait(2, 5000) == 2
    before = pods.primary
    before.kill()
    before.lose_disk()
    before.start()
    wait_until(pods.ready, 60)
    assert client.get("ff:kept") == b"1"
    assert before.role == "slave"
    assert pods.primary is not before


def test_a_primary_that_hangs_is_not_alive_and_is_replaced(pods: RedisPods, client: redis.Redis) -> None:
    before = pods.primary
    assert before.run("alive.sh") == before.run("alive.sh", "26379") == 0
    before.send(signal.SIGSTOP)
    try:
        assert before.run("alive.sh") != 0
        wait_until(lambda: any(pod.role == "master" for pod in pods.pods if pod is not before), 30)
    finally:
        before.send(signal.SIGCONT)
    wait_until(lambda: before.role == "slave", 60)


def test_renewed_certificates_are_taken_up(pods: RedisPods, client: redis.Redis) -> None:
    pods.renew_certificates()
    for pod in pods.pods:
        assert pod.run("probe.sh") == 0
        shown = ssl.get_server_certificate((pod.host, 6379))
        assert shown in (pod.folder / "tls" / "tls.crt").read_text()
        assert pod.run("alive.sh", "26379") != 0  # its kubelet starts it again
        pod.kill("sentinel")
        pod.start("sentinel")
    wait_until(pods.ready, 60)
    assert all(pod.run("alive.sh", "26379") == 0 for pod in pods.pods)


def test_after_a_power_cut_the_last_primary_leads(pods: RedisPods, client: redis.Redis) -> None:
    """And not the first pod, which was gone and is behind, nor while the primary is the last to start."""
    if pods.primary is pods.pods[0]:
        assert pods.pods[0].run("leave.sh") == 0
        wait_until(pods.ready, 60)
    first, primary = pods.pods[0], pods.primary
    wait_until(lambda: primary.client().info("replication")["min_slaves_good_slaves"] == 2, 60)
    first.kill()
    client.set("ff:newest", "1")
    pods.kill()
    first.start()
    time.sleep(2)
    assert first.role == ""  # its own Sentinel alone is not believed
    others = [pod for pod in pods.pods if pod is not primary]
    others[1].start()
    wait_until(lambda: [pod.role for pod in others] == ["slave", "slave"], 60)
    time.sleep(3)  # the Sentinels miss the primary for longer than they wait
    assert [pod.role for pod in others] == ["slave", "slave"]
    primary.start()
    wait_until(pods.ready, 60)
    assert client.get("ff:newest") == b"1"
    assert pods.primary is primary
    assert primary.run("leave.sh") == 0  # whoever has its data may be elected again
    wait_until(pods.ready, 60)
    assert pods.primary is not primary
