"""Real servers and channels on loopback; the reward and rollout contracts stand for unary and streaming calls."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet import errors
from flowfleet.proto import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from flowfleet.rpc import endpoint as rpc
from flowfleet.rpc import guard as rpc_guard
from tests.serving import listening

REWARD = "flowfleet.v1.RewardService"


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Describe does what the test says."""

    def __init__(self, describe: Callable[[], Any]) -> None:
        self.describe = describe
        self.calls = 0

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        self.calls += 1
        result = self.describe()
        return await result if asyncio.iscoroutine(result) else result


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Generate sends the events of the test, then raises its error."""

    def __init__(self, num_events: int, error: Exception | None = None) -> None:
        self.num_events, self.error, self.calls = num_events, error, 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        self.calls += 1
        for _ in range(self.num_events):
            yield rollout_pb2.GenerateEvent()
        if self.error is not None:
            raise self.error


class WritingRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """A plain coroutine that writes to the context."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(rollout_pb2.GenerateEvent())
        await context.write(rollout_pb2.GenerateEvent())
        if request.step == 1:
            raise errors.Conflict("step 1 is not mine")


class PlainReward(reward_pb2_grpc.RewardServiceServicer):
    """A plain function, not a coroutine."""

    def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse(name="plain")

    def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        raise ValueError("send samples")


@asynccontextmanager
async def running(*servicers: Any, token: str | None = None) -> AsyncIterator[str]:
    server = rpc.make_server(token=token)
    await rpc.HealthState(REWARD).register(server)
    async with listening(server, *servicers) as address:
        yield address


@asynccontextmanager
async def reward_stub(address: str, token: str | None = None) -> AsyncIterator[Any]:
    async with rpc.open_channel(address, token=token) as channel:
        yield reward_pb2_grpc.RewardServiceStub(channel)


def raising(error: Exception) -> Callable[[], Any]:
    def describe() -> Any:
        raise error

    return describe


async def describe_error(error: Exception) -> grpc.aio.AioRpcError:
    async with running(Reward(raising(error))) as address, reward_stub(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(reward_pb2.DescribeRequest(), timeout=10)
        return caught.value


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("lower max_batch to 8"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.InvalidRequest("name a job"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFound("no such blob"), grpc.StatusCode.NOT_FOUND),
        (errors.Conflict("expected step 3"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.TooLarge("over 64 MiB"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.DataLoss("SHA-256 differs"), grpc.StatusCode.DATA_LOSS),
        (errors.Broken("rank 1: out of memory"), grpc.StatusCode.INTERNAL),
        (TimeoutError("took too long"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_exceptions_reach_the_caller_as_code_and_message(error: Exception, code: grpc.StatusCode) -> None:
    received = await describe_error(error)
    assert (received.code(), received.details()) == (code, str(error))


async def test_an_unexpected_exception_is_internal_and_its_text_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "flowfleet.rpc.guard"):
        received = await describe_error(KeyError("secret-detail"))
    assert received.code() is grpc.StatusCode.INTERNAL
    assert "secret-detail" not in (received.details() or "")
    assert "secret-detail" in caplog.text


async def test_a_long_message_is_cut_not_lost() -> None:
    received = await describe_error(ValueError("x" * 100_000))
    assert received.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert received.details() == "x" * rpc_guard.MAX_ERROR_BYTES


async def test_a_message_of_wide_characters_fits_into_a_status() -> None:
    received = await describe_error(ValueError("\u2603" * 100_000))
    assert received.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(received.details() or "") == {"\u2603"}


GARBAGE = (b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 64, b"\x0a\x02\xc3\x28")
"""A field longer than the message, an endless varint, and a text that is no UTF-8."""


@pytest.mark.parametrize("token", [None, "secret"])
async def test_malformed_protobuf_is_an_invalid_argument_without_a_traceback(
    token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds for every kind of handler, the health service included. A caller without the token has nothing parsed and
    sees only the whole server's health."""

    async def codes(channel: grpc.aio.Channel) -> set[grpc.StatusCode]:
        unary: list[Any] = [
            channel.unary_unary(f"/{REWARD}/Score"),
            channel.unary_unary("/grpc.health.v1.Health/Check"),
        ]
        stream: Any = channel.unary_stream("/flowfleet.v1.RolloutService/Generate")
        found = set()
        for data in GARBAGE[:2]:
            for call in (*unary, stream):
                answer = call(data, timeout=10)
                try:
                    await (answer.read() if call is stream else answer)
                    found.add(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    found.add(error.code())
        return found

    invalid, refused = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED
    async with (
        running(PlainReward(), Rollout(1), token=token) as address,
        rpc.open_channel(address, token=token) as right,
        rpc.open_channel(address, token="wrong") as wrong,
    ):
        assert (await codes(right), await codes(wrong)) == (
            {invalid},
            {grpc.StatusCode.OK, refused} if token else {invalid},
        )
    assert "not a message of this method" in caplog.text
    assert "Traceback" not in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def begin_call(address: str, method: str, size_bytes: int) -> set[int]:
    """Begins a call without a token whose message says that it has so many bytes, and never ends it. Returns the types
    of the frames that come back on its stream."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def literal(*texts: str) -> bytes:
        return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in texts)

    header = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x"), ("te", "trailers")]
    fields = b"".join(literal(*pair) for pair in [*header, ("content-type", "application/grpc")])
    host, _, port = address.rpartition(":")
    seen: set[int] = set()
    with socket.create_connection((host, int(port)), timeout=5) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, fields))
        connection.sendall(frame(0, 0, 1, b"\0" + size_bytes.to_bytes(4, "big") + b"the beginning"))
        while RST_STREAM not in seen and (head := answers.read(9)):
            answers.read(int.from_bytes(head[:3], "big"))
            if int.from_bytes(head[5:], "big") == 1:
                seen.add(head[3])
    return seen


HEADERS, RST_STREAM = 1, 3


@pytest.mark.parametrize("method", [f"/{REWARD}/Score", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"])
async def test_strangers_are_answered_before_their_message_has_come(method: str) -> None:
    """Else whoever reaches the port fills the memory with messages that never end."""
    async with running(PlainReward(), token="secret") as address:
        assert {HEADERS, RST_STREAM} <= await asyncio.to_thread(begin_call, address, method, 60 * 2**20)


async def test_a_server_that_anyone_may_call_takes_small_messages_only() -> None:
    server = rpc.make_server(guarded=False)
    async with listening(server, PlainReward(), guarded=False) as address, rpc.open_channel(address) as channel:
        describe: Any = channel.unary_unary(f"/{REWARD}/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(bytes(100_000), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_text_that_is_no_unicode_is_an_invalid_argument() -> None:
    async with running(Rollout(1)) as address, rpc.open_channel(address) as channel:
        generate: Any = channel.unary_stream("/flowfleet.v1.RolloutService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(GARBAGE[2], timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


NO_ADDRESSES = (
    *(
        "unix:/tmp/a",
        "unix:///tmp/a:1",
        "dns:///host:1",
        "dns://1.1.1.1/a:1",
        "xds:///a:1",
        "ipv4:1.2.3.4:1,5.6.7.8:1",
    ),
    *(
        "host",
        "host:",
        "host:0",
        "host:65536",
        ":1",
        "a b:1",
        "host:1/path",
        "user@host:1",
        "[::1:1",
        "a\n:1",
        "-a:1",
        "",
    ),
)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_a_channel_leads_to_a_host_and_a_port_alone(address: str) -> None:
    with pytest.raises(ValueError, match="give HOST:PORT"):
        rpc.open_channel(address)


async def test_a_handlers_own_abort_passes_through() -> None:
    class Aborting(reward_pb2_grpc.RewardServiceServicer):
        async def Describe(self, request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")

    async with running(Aborting()) as address, reward_stub(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(reward_pb2.DescribeRequest(), timeout=10)
        received = caught.value
    assert (received.code(), received.details()) == (grpc.StatusCode.ALREADY_EXISTS, "mine")
    assert rpc.rpc_error_message(received) == "ALREADY_EXISTS: mine"


async def test_plain_functions_are_handlers_too() -> None:
    async with running(PlainReward()) as address, reward_stub(address) as stub:
        assert (await stub.Describe(reward_pb2.DescribeRequest(), timeout=10)).name == "plain"
        with pytest.raises(grpc.aio.AioRpcError, match="send samples") as caught:
            await stub.Score(reward_pb2.ScoreRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def collect(servicer: Any, step: int = 0) -> tuple[int, grpc.StatusCode]:
    """Events received, and the final code."""
    async with running(servicer) as address, rpc.open_channel(address) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(step=step), timeout=10)
        received = 0
        try:
            async for _ in call:
                received += 1
        except grpc.aio.AioRpcError as error:
            return received, error.code()
        return received, await call.code()


async def test_streams_deliver_what_came_before_an_error() -> None:
    assert await collect(Rollout(3)) == (3, grpc.StatusCode.OK)
    assert await collect(Rollout(3, errors.Conflict("no"))) == (3, grpc.StatusCode.FAILED_PRECONDITION)
    assert await collect(Rollout(0, ValueError("no"))) == (0, grpc.StatusCode.INVALID_ARGUMENT)


async def test_streams_of_coroutines_that_write() -> None:
    assert await collect(WritingRollout()) == (2, grpc.StatusCode.OK)
    assert await collect(WritingRollout(), step=1) == (2, grpc.StatusCode.FAILED_PRECONDITION)


async def test_unavailable_is_tried_four_times_and_nothing_else_is() -> None:
    async def attempts(error: Exception) -> int:
        servicer = Reward(raising(error))
        async with running(servicer) as address, reward_stub(address) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Describe(reward_pb2.DescribeRequest(), timeout=20)
        return servicer.calls

    assert await attempts(errors.Unavailable("draining")) == rpc.RETRY_POLICY["maxAttempts"] == 4
    assert await attempts(redis.ConnectionError("refused")) == 4
    for error in (errors.Conflict("x"), TimeoutError("x"), KeyError("x"), errors.DataLoss("x")):
        assert await attempts(error) == 1


async def test_a_stream_is_retried_only_before_its_first_message() -> None:
    early = Rollout(0, errors.Unavailable("busy"))
    assert await collect(early) == (0, grpc.StatusCode.UNAVAILABLE)
    assert early.calls == 4
    late = Rollout(1, errors.Unavailable("dying"))
    assert await collect(late) == (1, grpc.StatusCode.UNAVAILABLE)
    assert late.calls == 1


async def test_a_large_request_is_retried_as_well() -> None:
    """gRPC's default retry buffer of 256 KiB would commit such a call to its first attempt."""

    class Failing(Reward):
        async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
            self.calls += 1
            if self.calls < 3:
                raise errors.Unavailable("once more")
            return reward_pb2.ScoreResponse(scores=[reward_pb2.RewardScore(score=len(request.samples[0].media))])

    request = reward_pb2.ScoreRequest(samples=[reward_pb2.RewardSample(media=bytes(8 * 2**20))])
    async with running(Failing(lambda: None)) as address, reward_stub(address) as stub:
        assert (await stub.Score(request, timeout=20)).scores[0].score == 8 * 2**20


async def test_a_call_without_a_deadline_is_refused() -> None:
    servicer, rollout = Reward(reward_pb2.DescribeResponse), Rollout(1)
    async with running(servicer, rollout) as address, rpc.open_channel(address) as channel:
        with pytest.raises(ValueError, match="pass timeout="):
            await reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest())
        with pytest.raises(ValueError, match="pass timeout="):
            async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest()):
                pass
    assert servicer.calls == rollout.calls == 0


async def test_deadlines_end_calls() -> None:
    async def slow() -> reward_pb2.DescribeResponse:
        await asyncio.sleep(30)
        return reward_pb2.DescribeResponse()

    async with running(Reward(slow)) as address, reward_stub(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(reward_pb2.DescribeRequest(), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_message_over_the_limit_is_refused() -> None:
    async def call(size: int) -> grpc.StatusCode:
        request = reward_pb2.ScoreRequest(samples=[reward_pb2.RewardSample(media=bytes(size))])
        async with running(PlainReward()) as address, reward_stub(address) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Score(request, timeout=20)
            return caught.value.code()

    assert await call(rpc.MAX_MESSAGE_BYTES - 1024) is grpc.StatusCode.INVALID_ARGUMENT  # reached the handler
    assert await call(rpc.MAX_MESSAGE_BYTES) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("sent", [None, "wrong", "secre", "secret2"])
async def test_a_wrong_or_missing_token_is_refused(sent: str | None) -> None:
    servicer, rollout = Reward(reward_pb2.DescribeResponse), Rollout(1)
    async with (
        running(servicer, rollout, token="secret") as address,
        rpc.open_channel(address, token=sent) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="FLOWFLEET_RPC_TOKEN") as caught:
            await reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(
                rollout_pb2.GenerateRequest(), timeout=10
            ):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
    assert servicer.calls == rollout.calls == 0


async def test_the_right_token_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", "secret")
    servicer, rollout = Reward(reward_pb2.DescribeResponse), Rollout(2)
    async with running(servicer, rollout) as address, rpc.open_channel(address) as channel:
        await reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=10)
        stream = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=10)
        assert sum([1 async for _ in stream]) == 2


async def test_unknown_methods_are_unimplemented() -> None:
    async with running(Rollout(0)) as address, reward_stub(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(reward_pb2.DescribeRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_an_error_not_a_shared_port() -> None:
    async with running(Rollout(0)) as address:
        with pytest.raises(errors.Unavailable, match="choose another"):
            rpc.listen(rpc.make_server(), "127.0.0.1", int(address.rsplit(":", 1)[1]))


async def test_a_call_survives_a_server_that_starts_late() -> None:
    """Connection refused is UNAVAILABLE: the retries bridge a restart of about a second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with reward_stub(f"127.0.0.1:{port}") as stub:
        pending = asyncio.ensure_future(stub.Describe(reward_pb2.DescribeRequest(), timeout=10, wait_for_ready=True))
        await asyncio.sleep(1.0)
        server = rpc.make_server()
        reward_pb2_grpc.add_RewardServiceServicer_to_server(
            Reward(lambda: reward_pb2.DescribeResponse(name="late")), server
        )
        rpc.listen(server, "127.0.0.1", port)
        await server.start()
        assert (await pending).name == "late"
        await server.stop(None)


SERVICE = """
import argparse, asyncio, sys
from flowfleet.process import service
from flowfleet.rpc import endpoint as rpc
from flowfleet.proto import reward_pb2, reward_pb2_grpc

class Reward(reward_pb2_grpc.RewardServiceServicer):
    async def Describe(self, request, context):
        await asyncio.sleep(1.0)
        return reward_pb2.DescribeResponse(name="slow")

async def main(options):
    server = rpc.make_server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), server)
    async def serving(address):
        print("serving", options.port_file.exists(), flush=True)
    async def drain():
        print("drained", flush=True)
    await rpc.serve(server, host=options.host, port=options.port, port_file=options.port_file,
                    health_port=options.health_port,
                    health=rpc.HealthState("flowfleet.v1.RewardService"), on_serving=serving, on_drain=drain)

sys.exit(service.run_service("slow", main, service.rpc_parser("A slow service.")))
"""


def start(port_file: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """The service as a process."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, "--port-file", str(port_file), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


async def test_a_service_drains_on_sigterm(tmp_path: Path) -> None:
    """The port file appears when it serves; SIGTERM lets the running call end, then exits 0."""
    port_file = tmp_path / "port"
    process = start(port_file, "--metrics-port", "0")
    wait_for(port_file)

    status = health_pb2.HealthCheckResponse
    async with rpc.open_channel(port_file.read_text()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        before = (await health.Check(health_pb2.HealthCheckRequest(service=REWARD), timeout=5)).status
        watch = health.Watch(health_pb2.HealthCheckRequest(service=REWARD), timeout=10)
        assert (await watch.read()).status == before
        pending = asyncio.ensure_future(
            reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=10)
        )
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        after = (await watch.read()).status
        assert (before, (await pending).name, after) == (status.SERVING, "slow", status.NOT_SERVING)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "serving False\ndrained\n")
    assert re.search(r"metrics on http://127\.0\.0\.1:\d+/metrics", err)


async def test_the_health_port_answers_kubelets_and_nothing_else(tmp_path: Path) -> None:
    """A call in flight holds the drain open: then it takes no more."""
    port_file = tmp_path / "port"
    process = start(port_file, "--health-port", "0", FLOWFLEET_RPC_TOKEN="secret")
    assert process.stderr is not None
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, "it ended"
        found = re.search(r"health on (127\.0\.0\.1:\d+)", line)
    wait_for(port_file)

    async def probe(address: str, name: str) -> str:
        async with grpc.aio.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=name)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def call(address: str) -> list[str]:
        before = [await probe(address, name) for name in ("", REWARD)]
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with rpc.open_channel(port_file.read_text(), token="secret") as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            pending = asyncio.ensure_future(stub.Describe(reward_pb2.DescribeRequest(), timeout=10))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            after = [await probe(address, name) for name in ("", REWARD)]
            await pending
        return before + after

    states = await call(found[1])
    assert states == ["SERVING", "SERVING", "NOT_SERVING", "NOT_SERVING"]
    process.communicate(timeout=20)
    assert process.returncode == 0


def wait_for(port_file: Path) -> None:
    deadline = time.monotonic() + 20
    while not port_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_beyond_loopback_a_token_is_required() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=20, env={}
    )
    assert done.returncode == 2
    assert "set FLOWFLEET_RPC_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
