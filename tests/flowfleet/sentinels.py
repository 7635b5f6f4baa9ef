"""A primary, replicas and Sentinels as processes."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import redis

from flowfleet.redis.server import find_redis_server, free_port
from tests.waiting import wait_until

PASSWORD = "secret"
NAME = "flowfleet"


class Node:
    def __init__(self, folder: Path, config: str, *flags: str) -> None:
        folder.mkdir(parents=True)
        self.port = free_port()
        file = folder / "redis.conf"
        file.write_text(f'port {self.port}\nbind 127.0.0.1\ndir "{folder}"\n{config}')
        self._argv, self._log = [str(find_redis_server()), str(file), *flags], folder / "log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self, password: str | None = PASSWORD) -> redis.Redis:
        who: dict[str, Any] = {"port": self.port, "password": password, "protocol": 2}
        return redis.Redis(**who, socket_timeout=2.0, retry=None)  # type: ignore[arg-type]

    def answers(self, password: str | None = PASSWORD) -> bool:
        try:
            return bool(self.client(password).ping())
        except redis.ConnectionError:
            return False


COMMON = f'requirepass {PASSWORD}\nmasterauth {PASSWORD}\nsave ""\nappendonly yes\nrepl-diskless-sync-delay 0\n'


def url_of(node: Node) -> str:
    return f"redis://:{PASSWORD}@127.0.0.1:{node.port}/0"


class Pair:
    """A primary and a replica, without Sentinels."""

    def __init__(self, folder: Path) -> None:
        self.primary = Node(folder / "r0", COMMON)
        wait_until(self.primary.answers)
        self.replica = Node(folder / "r1", f"{COMMON}replicaof 127.0.0.1 {self.primary.port}\n")
        wait_until(self.replica.answers)
        wait_until(lambda: self.replica.client().info("replication")["master_link_status"] == "up")

    def kill(self) -> None:
        self.primary.kill()
        self.replica.kill()


class Group:
    """Two replicas follow a primary, which refuses writes while none of them keeps up. Three Sentinels watch."""

    def __init__(self, folder: Path) -> None:
        common = f"{COMMON}min-replicas-to-write 1\nmin-replicas-max-lag 3\n"
        self.primary = Node(folder / "r0", common)
        wait_until(self.primary.answers)
        follow = f"{common}replicaof 127.0.0.1 {self.primary.port}\n"
        self.replicas = [Node(folder / f"r{number}", follow) for number in (1, 2)]
        for replica in self.replicas:
            wait_until(replica.answers)
            wait_until(partial(_follows, replica))
        watch = (
            f"sentinel monitor {NAME} 127.0.0.1 {self.primary.port} 2\nsentinel auth-pass {NAME} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {NAME} 1000\nsentinel failover-timeout {NAME} 5000\n"
        )
        self.sentinels = [Node(folder / f"s{number}", watch, "--sentinel") for number in range(3)]
        for sentinel in self.sentinels:
            wait_until(partial(sentinel.answers, None))
            wait_until(partial(self._sees_all, sentinel))

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{places}/{NAME}/0"

    def kill(self) -> None:
        for node in (self.primary, *self.replicas, *getattr(self, "sentinels", [])):
            node.kill()

    def _sees_all(self, sentinel: Node) -> bool:
        state: Any = sentinel.client(None).sentinel_master(NAME)
        return (state["num-slaves"], state["num-other-sentinels"]) == (2, 2)


def _follows(replica: Node) -> bool:
    return bool(replica.client().info("replication")["master_link_status"] == "up")
