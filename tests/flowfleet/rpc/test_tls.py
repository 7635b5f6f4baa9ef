"""Mutual TLS between real servers and channels: what is let in, what is refused and how that reads, and renewal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.proto import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from flowfleet.rpc import endpoint as rpc
from flowfleet.rpc import tls
from tests.certificates import Authority
from tests.serving import listening

Code = grpc.StatusCode


class Reward(reward_pb2_grpc.RewardServiceServicer):
    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse(name="reached")


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Each event waits for the next `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        for _ in range(2):
            await self.go.acquire()
            yield rollout_pb2.GenerateEvent()


@pytest.fixture
def ca() -> Authority:
    return Authority()


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tls.TLS_DIR, tls.TLS_NAME):
        monkeypatch.delenv(name, raising=False)


class Sides:
    """Takes the environment of one side at a time, as two processes would have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def be(self, directory: Path | None, name: str = tls.DEFAULT_NAME) -> None:
        self._monkeypatch.setenv(tls.TLS_NAME, name)
        if directory is None:
            self._monkeypatch.delenv(tls.TLS_DIR, raising=False)
        else:
            self._monkeypatch.setenv(tls.TLS_DIR, str(directory))


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Sides:
    return Sides(monkeypatch)


@asynccontextmanager
async def served(
    rollout: Rollout | None = None, *, token: str | None = None, guarded: bool = True
) -> AsyncIterator[str]:
    server, servicers = rpc.make_server(token=token, guarded=guarded), [Reward(), *([rollout] if rollout else [])]
    async with listening(server, *servicers, guarded=guarded) as address:
        yield address


async def describe(channel: grpc.aio.Channel) -> str:
    stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
    answer = await stub.Describe(reward_pb2.DescribeRequest(), timeout=20)
    return str(answer.name)


async def refusal(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await describe(channel)
    return caught.value.code(), caught.value.details() or ""


async def between(
    sides: Sides, server: Path | None, client: Path | None, **client_name: str
) -> tuple[grpc.StatusCode, str]:
    """Errors of a client that the server rejects, or that rejects the server."""
    sides.be(server)
    async with served() as address:
        sides.be(client, **client_name)
        async with rpc.open_channel(address) as channel:
            code, message = await refusal(channel)
            return code, message.replace(address, "ADDRESS")


async def test_certificates_of_one_ca_let_in_and_the_token_stays_required(
    tmp_path: Path, ca: Authority, sides: Sides
) -> None:
    sides.be(ca.issue(tmp_path / "server"))
    async with served(token="secret") as address:
        sides.be(ca.issue(tmp_path / "client"))
        async with rpc.open_channel(address, token="secret") as channel:
            assert await describe(channel) == "reached"
        async with rpc.open_channel(address, token="other") as channel:
            code, message = await refusal(channel)
            assert (code, "FLOWFLEET_RPC_TOKEN" in message) == (Code.UNAUTHENTICATED, True)


async def test_a_plain_client_is_told_to_speak_tls(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    code, message = await between(sides, ca.issue(tmp_path / "server"), None)
    assert (code, message) == (Code.UNAVAILABLE, "ADDRESS speaks TLS: set FLOWFLEET_TLS_DIR")


async def test_a_client_is_told_of_a_plain_server(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    code, message = await between(sides, None, ca.issue(tmp_path / "client"))
    assert code is Code.UNAVAILABLE
    assert message == "ADDRESS speaks no TLS: set FLOWFLEET_TLS_DIR for that service as well"


async def test_a_server_of_another_ca_is_refused(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    code, message = await between(sides, Authority().issue(tmp_path / "server"), ca.issue(tmp_path / "client"))
    assert code is Code.UNAVAILABLE
    assert message == "the certificate of ADDRESS is refused: unable to get local issuer certificate"


async def test_a_client_of_another_ca_is_refused(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    """It trusts the server, so only the server can refuse; its own files do not fit each other."""
    other = Authority()
    client = other.issue(tmp_path / "client")
    (client / "ca.crt").write_bytes(ca.pem + other.pem)
    code, message = await between(sides, ca.issue(tmp_path / "server"), client)
    assert code is Code.UNAVAILABLE
    assert message == f"ADDRESS refuses the certificate in {client}: both must come from one CA and be valid"


async def test_a_client_without_a_certificate_is_refused(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    sides.be(ca.issue(tmp_path / "server"))
    options = [("grpc.ssl_target_name_override", "flowfleet")]
    async with (
        served() as address,
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.pem), options=options) as channel,
    ):
        assert (await refusal(channel))[0] is Code.UNAVAILABLE


async def test_a_server_of_another_name_is_refused(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    sides.be(ca.issue(tmp_path / "server", "elsewhere"), name="elsewhere")
    async with served() as address:
        sides.be(ca.issue(tmp_path / "client"))
        async with rpc.open_channel(address) as channel:
            code, message = await refusal(channel)
    assert code is Code.UNAVAILABLE
    assert message == f"the certificate of {address} is not for flowfleet: reissue it, or set FLOWFLEET_TLS_NAME"


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_client_of_another_name_is_refused_by_the_fleet_and_not_by_what_others_call(
    guarded: bool, tmp_path: Path, ca: Authority, sides: Sides
) -> None:
    async def scenario() -> None:
        sides.be(ca.issue(tmp_path / "server", "flowfleet", "elsewhere"))
        async with served(guarded=guarded) as address:
            sides.be(ca.issue(tmp_path / "client", "elsewhere"), name="elsewhere")
            async with rpc.open_channel(address) as channel:
                if not guarded:
                    assert await describe(channel) == "reached"
                    return
                code, message = await refusal(channel)
        assert code is Code.UNAUTHENTICATED
        assert message.startswith("the client's certificate is not for flowfleet")

    await scenario()


async def test_what_is_not_guarded_takes_no_token_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWFLEET_RPC_TOKEN", raising=False)
    with pytest.raises(ValueError, match="FLOWFLEET_RPC_TOKEN"):
        rpc.listen(rpc.make_server(), "0.0.0.0", 0)
    server = rpc.make_server(guarded=False)
    assert rpc.listen(server, "0.0.0.0", 0, guarded=False) > 0
    await server.stop(None)


# -- files that cannot work ------------------------------------------------------------------------------------------


def test_an_expired_certificate_is_told_at_the_start(tmp_path: Path, ca: Authority) -> None:
    with pytest.raises(ValueError, match=r"tls\.crt cannot be used: certificate has expired"):
        tls.Certificates(ca.issue(tmp_path / "old", expired=True))


@pytest.mark.parametrize("name", tls.FILES)
def test_a_missing_file_is_named(name: str, tmp_path: Path, ca: Authority) -> None:
    directory = ca.issue(tmp_path / "tls")
    (directory / name).unlink()
    with pytest.raises(ValueError, match=rf"FLOWFLEET_TLS_DIR=.*: {name} cannot be read \(No such file"):
        tls.Certificates(directory)


def test_a_key_of_another_certificate_is_told(tmp_path: Path, ca: Authority) -> None:
    directory = ca.issue(tmp_path / "tls")
    shutil.copy(ca.issue(tmp_path / "other") / "tls.key", directory / "tls.key")
    with pytest.raises(ValueError, match=r"tls\.key is not the key of .*tls\.crt"):
        tls.Certificates(directory)


@pytest.mark.parametrize("name", tls.FILES)
def test_what_is_no_pem_is_told(name: str, tmp_path: Path, ca: Authority) -> None:
    directory = ca.issue(tmp_path / "tls")
    (directory / name).write_text("certificate")
    with pytest.raises(ValueError, match=rf"{name}.* PEM certificate"):
        tls.Certificates(directory)


def test_a_ca_that_did_not_sign_is_told(tmp_path: Path, ca: Authority) -> None:
    with pytest.raises(ValueError, match=r"ca\.crt did not sign it"):
        tls.Certificates(ca.issue(tmp_path / "tls", trusted=Authority()))


def test_a_certificate_without_the_name_is_told(tmp_path: Path, ca: Authority) -> None:
    with pytest.raises(ValueError, match=r"'flowfleet'.*FLOWFLEET_TLS_NAME"):
        tls.Certificates(ca.issue(tmp_path / "tls", "elsewhere"))


# -- renewal ---------------------------------------------------------------------------------------------------------


async def test_new_certificates_are_taken_while_calls_go_on(tmp_path: Path, ca: Authority, sides: Sides) -> None:
    """The CA changes as well: what was connected ends its stream, what comes after speaks by the new CA alone."""
    server, client = ca.issue(tmp_path / "server"), ca.issue(tmp_path / "client")
    rollout = Rollout()
    sides.be(server)
    async with served(rollout) as address:
        sides.be(client)
        async with rpc.open_channel(address) as channel:
            assert await describe(channel) == "reached"
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            stream = stub.Generate(rollout_pb2.GenerateRequest(), timeout=30)
            rollout.go.release()
            assert await stream.read() is not grpc.aio.EOF
            new = Authority()
            new.issue(server)
            new.issue(client)
            assert await describe(channel) == "reached"
            rollout.go.release()
            assert await stream.read() is not grpc.aio.EOF
            assert await stream.read() is grpc.aio.EOF
            sides.be(ca.issue(tmp_path / "late"))
            async with rpc.open_channel(address) as old:
                assert (await refusal(old))[0] is Code.UNAVAILABLE


async def test_new_files_that_cannot_work_are_not_used(
    tmp_path: Path, ca: Authority, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = ca.issue(tmp_path / "server"), ca.issue(tmp_path / "client")
    sides.be(server)
    async with served() as address:
        sides.be(client)
        async with rpc.open_channel(address) as channel:
            (server / "tls.key").unlink()
            ca.issue(client, expired=True)
            assert await describe(channel) == "reached"
        assert "TLS certificates not renewed, the last valid ones stay" in caplog.text
        ca.issue(server)
        ca.issue(client)
        async with rpc.open_channel(address) as channel:
            assert await describe(channel) == "reached"
