"""What proves a job's trainer opens nothing of another job: blobs, streams, rollouts. Redis may lose its user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis

from flowfleet.local import secrets
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import acl, keys
from flowfleet.redis.client import REDIS_LOGIN, connect_sync, with_login
from flowfleet.rpc import kinds
from flowfleet.rpc.endpoint import open_channel
from tests.e2e.conftest import Fleet
from tests.waiting import wait_until

Secrets = Callable[[str], dict[str, str]]


@pytest.fixture
def secrets_of(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secrets]:
    """What the controller of the fleet gives a job's trainer. In the end the fleet's Redis knows of no refusal."""
    own = secrets.read(Path(fleet.stack.state_dir) / "secrets", "controller")

    def of(job_id: str) -> dict[str, str]:
        with monkeypatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            return kinds.job_secrets(job_id)

    yield of
    with connect_sync(fleet.stack.redis_url) as operator:
        operator.acl_log_reset()


@pytest.fixture
def two_jobs(fleet: Fleet, small_job: Callable[..., dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Two jobs that train."""
    many = small_job(**{"schedule.steps": 1000, "schedule.validate_every": 1000})
    jobs = [fleet.client.submit(many).id for _ in range(2)]
    wait_until(lambda: all(fleet.client.job(job).progress.step >= 1 for job in jobs), timeout_s=120)
    yield jobs[0], jobs[1]
    for job in jobs:
        fleet.client.cancel(job)
        fleet.client.wait(job)


def test_a_jobs_credentials_open_nothing_of_another_job(
    fleet: Fleet, two_jobs: tuple[str, str], secrets_of: Secrets
) -> None:
    own, other = two_jobs
    login = secrets_of(own)[REDIS_LOGIN]
    with connect_sync(fleet.stack.redis_url) as operator, connect_sync(with_login(fleet.stack.redis_url, login)) as its:
        operator.set(keys.blob(own, "trajectory", "x"), "of its own", ex=99)
        operator.set(keys.blob(other, "trajectory", "x"), "of another", ex=99)
        assert its.get(keys.blob(own, "trajectory", "x")) == b"of its own"
        for command in (
            ("GET", keys.blob(other, "trajectory", "x")),
            ("SET", keys.blob(other, "adapter", 1), "x"),
            ("UNLINK", keys.blob(other, "adapter", 1)),
            ("XADD", keys.trajectories(other), "*", "sample", "x"),
            ("XADD", keys.trajectories(own), "*", "sample", "x"),  # its ranks do not sample
            ("HGETALL", keys.job(own)),
            ("HSET", keys.replicas("records"), "r", "{}"),
            ("ACL", "SETUSER", acl.job_user(own), "allkeys"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                its.execute_command(*command)
    wrong = login.partition(":")[0] + ":" + secrets_of(other)[REDIS_LOGIN].partition(":")[2]
    stranger = redis.Redis.from_url(with_login(fleet.stack.redis_url, wrong), protocol=2, retry=None)
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


async def test_a_jobs_token_moves_no_rollout_of_another_job(
    fleet: Fleet, two_jobs: tuple[str, str], secrets_of: Secrets
) -> None:
    own, other = two_jobs
    address = fleet.stack.processes["rollout-0"].address
    old = secrets_of(own)["FLOWFLEET_RPC_TOKEN"]
    token = secrets_of(own)["FLOWFLEET_RPC_TOKEN"]

    async def start(token: str, job_id: str) -> str:
        async with open_channel(address, token=token) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            try:
                await stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=20)
                request = rollout_pb2.StartWeightUpdateRequest(job_id=job_id, version=10**6, attempt=1)
                await stub.StartWeightUpdate(request, timeout=20)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        return "OK"

    said = f"PERMISSION_DENIED: the token of job {own}'s trainer opens nothing of job {other!r}"
    assert await start(token, other) == said
    assert (await start(token, own)).startswith("FAILED_PRECONDITION: ")  # a trainer of attempt 1 was replaced
    assert await start(old, own) == (
        f"PERMISSION_DENIED: a later attempt has replaced this trainer of job {own}: it must end"
    )
    forged = token.replace(own, other)
    assert (await start(forged, other)).startswith("UNAUTHENTICATED: ")


@pytest.mark.long
def test_users_that_redis_loses_are_made_again_and_go_with_their_jobs(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]]
) -> None:
    job = fleet.client.submit(small_job(**{"schedule.steps": 8}))
    wait_until(lambda: fleet.client.job(job.id).progress.step >= 2, timeout_s=120)
    trainer = fleet.trainer(job)
    with connect_sync(fleet.stack.redis_url) as operator:
        assert operator.execute_command("ACL", "DELUSER", acl.job_user(job.id)) == 1  # as a restart would
        wait_until(lambda: fleet.client.job(job.id).progress.step >= 7, timeout_s=120)
        assert fleet.trainer(job) == trainer  # it waited for its user
        assert fleet.client.wait(job.id, 120).status == "succeeded"
        wait_until(lambda: acl.job_user(job.id) not in operator.acl_users(), timeout_s=20)
        operator.acl_log_reset()
