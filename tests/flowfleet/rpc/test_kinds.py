"""Which kind of service may call which gRPC method, tried on real servers by token and by certificate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool

from flowfleet.process import service
from flowfleet.rpc import endpoint as rpc
from flowfleet.rpc import kinds, tls
from tests import serving
from tests.certificates import Authority

Code = grpc.StatusCode
TOKENS: dict[kinds.Caller, str] = {caller: f"the token of the {caller}" for caller in kinds.CALLERS}
SERVICES = ("RolloutService", "TrainerService", "RewardService", "ModelService")
METHODS = tuple(
    f"/flowfleet.v1.{name}/{method.name}"
    for name in SERVICES
    for method in descriptor_pool.Default().FindServiceByName(f"flowfleet.v1.{name}").methods
)
OF_TRAINERS = {
    f"/flowfleet.v1.RolloutService/{name}"
    for name in (
        "GetStatus",
        "InitWeightTransfer",
        "StartWeightUpdate",
        "UpdateWeights",
        "FinishWeightUpdate",
        "PullAdapter",
    )
} | {"/flowfleet.v1.RewardService/Describe", "/flowfleet.v1.RewardService/ScoreWithGradient"}
"""What services/trainer/publishing/replicas.py and services/trainer/step/gradients/client.py call."""

OF_ROLLOUTS = {"/flowfleet.v1.ModelService/Read"}
"""What flowfleet/peers.py calls."""
TO_ROLLOUTS = {f"/flowfleet.v1.RolloutService/{name}" for name in ("GetStatus", "Generate", "Drain")}
"""What a controller calls, by the token that rollouts see: none of it is a trainer's."""


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tls.TLS_DIR, tls.TLS_NAME, service.RPC_TOKEN, service.RPC_ACCEPT, kinds.JOB_ACCEPT):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Every service, none of whose methods does anything: an admitted call ends with INTERNAL."""
    server = rpc.make_server()
    await rpc.HealthState().register(server)
    async with serving.listening(server, *(servicer() for servicer in serving.SERVICES)) as address:
        yield address


async def answers(channel: grpc.aio.Channel) -> dict[str, Code]:
    """The code that each method ends with."""
    found = {}
    for method in (*METHODS, "/grpc.health.v1.Health/Check"):
        is_stream = method.endswith(("/Generate", "/Read"))
        call: Any = (channel.unary_stream if is_stream else channel.unary_unary)(method)
        try:
            if is_stream:
                async for _ in call(b"", timeout=20):
                    pass
            else:
                await call(b"", timeout=20)
            found[method] = Code.OK
        except grpc.aio.AioRpcError as error:
            found[method] = error.code()
    return found


def expected(kind: str, refused: Code) -> dict[str, Code]:
    """Written down here once more, by hand."""
    by_kind = {"controller": {*METHODS}, "sampler": TO_ROLLOUTS, "trainer": OF_TRAINERS, "rollout": OF_ROLLOUTS}
    allowed = by_kind.get(kind, set())
    codes = {method: Code.INTERNAL if method in allowed else refused for method in METHODS}
    return {**codes, "/grpc.health.v1.Health/Check": Code.OK}


async def asked_with(token: str | None, address: str) -> dict[str, Code]:
    async with rpc.open_channel(address, token=token) as channel:
        return await answers(channel)


async def test_each_kinds_token_opens_its_methods_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept(TOKENS))
    async with served() as address:
        for kind, token in TOKENS.items():
            assert await asked_with(token, address) == expected(kind, Code.PERMISSION_DENIED), kind
        for stranger in (None, "another", kinds.digest(TOKENS["controller"])):
            assert await asked_with(stranger, address) == expected("stranger", Code.UNAUTHENTICATED), stranger


async def test_what_a_trainer_sees_of_its_controller_opens_no_other_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_TOKEN, TOKENS["controller"])
    tokens = {job: kinds.job_token(job) for job in ("a", "b")}
    environment = kinds.job_accept("a")
    assert not {TOKENS["controller"], *tokens.values()} & {*environment.values()}
    monkeypatch.delenv(service.RPC_TOKEN)
    assert kinds.job_token("a") is None
    assert kinds.job_accept("a") == {}

    monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept(TOKENS))
    async with served() as address:  # a rollout, or a trainer of before
        assert await asked_with(tokens["a"], address) == expected("stranger", Code.UNAUTHENTICATED)
    monkeypatch.setenv(kinds.JOB_ACCEPT, environment[kinds.JOB_ACCEPT])
    async with served() as address:
        assert await asked_with(tokens["a"], address) == expected("controller", Code.OK)
        assert await asked_with(tokens["b"], address) == expected("stranger", Code.UNAUTHENTICATED)
        assert await asked_with(TOKENS["trainer"], address) == expected("trainer", Code.PERMISSION_DENIED)
    monkeypatch.setenv(kinds.JOB_ACCEPT, "abc")
    with pytest.raises(ValueError, match="FLOWFLEET_RPC_ACCEPT_JOB must be the SHA-256"):
        rpc.make_server()


@pytest.mark.parametrize("per_kind", [True, False])
async def test_a_jobs_token_is_a_trainers_until_a_later_attempt_calls(
    per_kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service.RPC_TOKEN, TOKENS["controller"])
    if per_kind:
        monkeypatch.setenv("FLOWFLEET_TRAINER_RPC_TOKEN", TOKENS["trainer"])
        monkeypatch.setenv("FLOWFLEET_TRAINER_RPC_ACCEPT", kinds.accept(TOKENS))
    first, second, of_other = (kinds.job_secrets(job) for job in ("a", "a", "b"))
    given = {value for secrets in (first, of_other) for value in secrets.values()}
    assert not any(kinds.digest(TOKENS["trainer"]) in value or value in TOKENS.values() for value in given)
    if per_kind:
        monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept(TOKENS))
    token, of_no_job = service.RPC_TOKEN, expected("trainer", Code.PERMISSION_DENIED)
    about_jobs = {method for method in of_no_job if "Weight" in method or "PullAdapter" in method}
    of_no_job |= dict.fromkeys(about_jobs, Code.PERMISSION_DENIED)  # their job_id is ""
    async with served() as address:
        for admitted in (first, of_other, second):
            assert await asked_with(admitted[token], address) == of_no_job
        assert {*(await asked_with(first[token], address)).values()} == {Code.PERMISSION_DENIED}
        for forged in (f"b{second[token][1:]}", f"{second[token]}0", "a/1/", "a//", "//"):
            assert await asked_with(forged, address) == expected("stranger", Code.UNAUTHENTICATED)
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    async with served() as address:  # a rank of the trainer, which samples
        assert await asked_with(first[token], address) == expected("trainer", Code.PERMISSION_DENIED)
        assert await asked_with(of_other[token], address) == expected("stranger", Code.UNAUTHENTICATED)
        assert await asked_with(TOKENS["controller"], address) == expected("controller", Code.OK)


async def test_a_kind_that_is_not_listed_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept({"trainer": TOKENS["trainer"]}))
    async with served() as address:
        found = await asked_with(TOKENS["controller"], address)
        assert found == expected("stranger", Code.UNAUTHENTICATED)


async def test_one_token_for_a_whole_fleet_opens_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_TOKEN, "one for all")
    async with served() as address:
        assert await asked_with("one for all", address) == expected("controller", Code.OK)


async def test_the_name_in_a_certificate_says_the_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = Authority()
    folders = {kind: ca.issue(tmp_path / kind, "flowfleet", f"{kind}.flowfleet") for kind in kinds.KINDS}
    fleet_wide = ca.issue(tmp_path / "fleet", "flowfleet", "rollout.other", "x-rollout.flowfleet")

    async def seen_by(folder: Path, address: str) -> dict[str, Code]:
        monkeypatch.setenv(tls.TLS_DIR, str(folder))
        return await asked_with(None, address)

    monkeypatch.setenv(tls.TLS_DIR, str(folders["trainer"]))
    async with served() as address:
        for kind, folder in folders.items():
            assert await seen_by(folder, address) == expected(kind, Code.PERMISSION_DENIED), kind
        assert await seen_by(fleet_wide, address) == expected("controller", Code.OK)


async def test_the_certificate_counts_beside_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that stole the controller's token cannot train with it."""
    ca = Authority()
    monkeypatch.setenv(tls.TLS_DIR, str(ca.issue(tmp_path / "rollout", "flowfleet", "rollout.flowfleet")))
    monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept(TOKENS))
    async with served() as address, rpc.open_channel(address, token=TOKENS["controller"]) as channel:
        train: Any = channel.unary_unary("/flowfleet.v1.TrainerService/TrainStep")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await train(b"", timeout=20)
        assert caught.value.code() is Code.PERMISSION_DENIED
        assert caught.value.details() == (
            "the certificate of a rollout may not call /flowfleet.v1.TrainerService/TrainStep"
        )


@pytest.mark.parametrize("text", ["controller", "controller=abc", "boss=" + "0" * 64, "controller=" + "0" * 64 + ","])
def test_a_malformed_list_of_callers_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_ACCEPT, text)
    with pytest.raises(ValueError, match="FLOWFLEET_RPC_ACCEPT must be KIND=SHA256"):
        rpc.make_server()


def test_beyond_loopback_a_list_of_callers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set FLOWFLEET_RPC_TOKEN"):
        service.require_secret("0.0.0.0", service.RPC_TOKEN)
    monkeypatch.setenv(service.RPC_ACCEPT, kinds.accept(TOKENS))
    service.require_secret("0.0.0.0", service.RPC_TOKEN)
    with pytest.raises(ValueError, match="set FLOWFLEET_API_KEY"):
        service.require_secret("0.0.0.0", service.API_KEY)


def test_a_trainer_is_handed_its_own_secrets_and_none_of_the_controllers() -> None:
    controller = {
        "PATH": "/bin",
        "FLOWFLEET_DEVICE": "cpu",
        "FLOWFLEET_REDIS_CA": "ca.pem",
        "FLOWFLEET_API_KEY": "key",
        "FLOWFLEET_ARCHIVE": "s3://me:secret@host",
        "FLOWFLEET_READER_AWS_ACCESS_KEY_ID": "id",
        "FLOWFLEET_REDIS_URL": "redis://controller:c@h",
        "FLOWFLEET_RPC_TOKEN": "of the controller",
        "FLOWFLEET_REWARD_RPC_TOKEN": "of rewards",
        "FLOWFLEET_ROLLOUT_RPC_TOKEN": "to rollouts",
        "FLOWFLEET_TRAINER_REDIS_URL": "redis://trainer:t@h",
        "FLOWFLEET_TRAINER_RPC_TOKEN": "of trainers",
        "FLOWFLEET_TRAINER_RPC_ACCEPT": "controller=…",
        "FLOWFLEET_TRAINER_REWARD_RPC_TOKEN": "of rewards",
    }
    public = {"PATH": "/bin", "FLOWFLEET_DEVICE": "cpu", "FLOWFLEET_REDIS_CA": "ca.pem"}
    assert kinds.trainer_environment(controller) == {
        **public,
        "FLOWFLEET_REDIS_URL": "redis://trainer:t@h",
        "FLOWFLEET_RPC_TOKEN": "of trainers",
        "FLOWFLEET_RPC_ACCEPT": "controller=…",
        "FLOWFLEET_REWARD_RPC_TOKEN": "of rewards",
    }
    shared = {name: value for name, value in controller.items() if "_TRAINER_" not in name}
    assert kinds.trainer_environment(shared) == {
        **public,
        "FLOWFLEET_REDIS_URL": "redis://controller:c@h",
        "FLOWFLEET_RPC_TOKEN": "of the controller",
    }
    assert kinds.without_own(controller) == public
