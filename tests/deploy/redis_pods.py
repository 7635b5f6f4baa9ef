"""The chart's highly available Redis as processes of this machine, with TLS: its scripts as they are, but for paths and
addresses. A pod is a loopback address."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import redis

from tests.certificates import Authority
from tests.deploy.conftest import Rendered, environment
from tests.waiting import wait_until

PASSWORDS = {"controller": "of-controller", "rollout": "of-rollout", "trainer": "of-trainer"}
OPERATOR = "of-the-operator"
HOSTS = [f"127.0.77.{number}" for number in (1, 2, 3)]


class RedisPod:
    def __init__(self, folder: Path, number: int, files: dict[str, str]) -> None:
        self.folder, self.host = folder, HOSTS[number]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for part in ("etc", "data", "tmp"):
            (folder / part).mkdir(parents=True)
        places = {"/etc/redis": folder / "etc", "/etc/flowfleet/tls": folder / "tls", "/data": folder / "data"}
        places |= {"/tmp": folder / "tmp"}
        for name, text in files.items():
            moved = re.sub("/etc/redis|/etc/flowfleet/tls|/data|/tmp", lambda found: str(places[found[0]]), text)
            moved = moved.replace("redis-cli $tls", f"redis-cli -h {self.host} $tls")
            (folder / "etc" / name).write_text(moved.replace("bind * -::*", f"bind {self.host}"))
        self._env = {
            **os.environ,
            "REDISCLI_AUTH": OPERATOR,
            **{f"REDIS_PASSWORD_{kind}": word for kind, word in PASSWORDS.items()},
            "REDIS_SELF": self.host,
            "REDIS_PEERS": " ".join(HOSTS),
            "DOWN_AFTER_SECONDS": "1",
            "MEMORY_LIMIT_BYTES": str(2**28),
        }

    def start(self, *names: str) -> None:
        """`start`, Redis, and `sentinel`; both without a name."""
        for name in names or ("sentinel", "start"):
            with (self.folder / f"{name}.log").open("ab") as log:
                argv = ["sh", str(self.folder / "etc" / f"{name}.sh")]
                self._processes[name] = subprocess.Popen(
                    argv, env=self._env, stdout=log, stderr=log, start_new_session=True
                )

    def run(self, script: str, *arguments: str) -> int:
        argv = ["sh", str(self.folder / "etc" / script), *arguments]
        return subprocess.run(argv, env=self._env, capture_output=True, timeout=60).returncode

    def send(self, number: signal.Signals, name: str = "start") -> None:
        os.killpg(self._processes[name].pid, number)

    def kill(self, *names: str) -> None:
        for name in names or tuple(self._processes):
            if self._processes[name].poll() is None:
                self.send(signal.SIGKILL, name)
            self._processes[name].wait()

    def lose_disk(self) -> None:
        shutil.rmtree(self.folder / "data")
        (self.folder / "data").mkdir()

    def log(self, name: str = "start") -> str:
        return (self.folder / f"{name}.log").read_text()

    def client(self, port: int = 6379, user: str = "default", password: str = OPERATOR) -> redis.Redis:
        files = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
        tls: dict[str, Any] = {name: str(self.folder / "tls" / file) for name, file in files.items()}
        who: dict[str, Any] = {"username": user, "password": password}
        return redis.Redis(self.host, port, protocol=2, socket_timeout=5, ssl=True, **who, **tls)

    @property
    def role(self) -> str:
        try:
            return str(self.client().info("replication")["role"])
        except redis.RedisError:
            return ""


class RedisPods:
    def __init__(self, folder: Path) -> None:
        rendered = Rendered("ha-redis")
        files = rendered.get("ConfigMap", "redis-ha")["data"]
        self.pods = [RedisPod(folder / f"pod-{number}", number, files) for number in range(3)]
        self._authority = Authority()
        self.renew_certificates()
        url = environment(rendered.pod("controller"))["FLOWFLEET_REDIS_URL"]
        for number, host in enumerate(HOSTS):
            url = url.replace(f"fleet-flowfleet-redis-ha-{number}.fleet-flowfleet-redis-ha.ns.svc", host)
        url = url.replace("/etc/flowfleet/tls", str(self.pods[0].folder / "tls"))
        self.url = url.replace("$(FLOWFLEET_REDIS_PASSWORD)", PASSWORDS["controller"])
        for pod in self.pods:
            pod.start()

    def renew_certificates(self) -> None:
        for pod in self.pods:
            self._authority.issue(pod.folder / "tls", *HOSTS)

    def ready(self) -> bool:
        return all(pod.run("probe.sh", "ready") == pod.run("probe.sh", "sentinel") == 0 for pod in self.pods)

    @property
    def primary(self) -> RedisPod:
        """Waits until exactly one pod says that it is the primary, and returns it."""
        wait_until(lambda: [pod.role for pod in self.pods].count("master") == 1, 60)
        return next(pod for pod in self.pods if pod.role == "master")

    def kill(self) -> None:
        for pod in self.pods:
            pod.kill()
