"""Errors about wrong reward services, each a real server: they name the reward, the service and
its address, and say what to change. None of them makes a score."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from flowfleet.job.spec import RewardPart
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    DescribeResponse,
    RewardSample,
    RewardScore,
    ScoreResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server
from flowfleet.rewards.requests import EncodedSample
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.rewards import client as reward_service
from services.controller.rewards.answers import Answer
from services.controller.rewards.failures import RewardFailure
from services.controller.rewards.job_rewards import JobRewards
from tests.certificates import Authority

Server = Callable[[], AbstractAsyncContextManager[str]]
SAMPLES = [EncodedSample(b"x" * 2**20, "image/png", "", {}, "0", f"job/0/0/{index}") for index in range(4)]
PLACE = r"rewards\.beauty: service 'judge' at 127\.0\.0\.1:\d+ "


class Beauty(RewardServiceServicer):
    """Gives each sample 0.5."""

    contract = 1

    async def Describe(self, request: Any, context: Any) -> DescribeResponse:
        about: dict[str, Any] = {"modalities": [MODALITY_IMAGE], "score_max": 1.0, "contract": self.contract}
        return DescribeResponse(name="beauty", version="1", **about)

    async def Score(self, request: Any, context: Any) -> ScoreResponse:
        return ScoreResponse(scores=self.scores(list(request.samples)))

    def scores(self, samples: list[RewardSample]) -> list[RewardScore]:
        return [RewardScore(sample_id=sample.sample_id, score=0.5) for sample in samples]


class Newer(Beauty):
    contract = 3


class Ends(Beauty):
    """Ends each Score with a code."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self._code, self._message = code, message

    async def Score(self, request: Any, context: Any) -> ScoreResponse:
        await context.abort(self._code, self._message)
        raise AssertionError


class Silent(Beauty):
    async def Score(self, request: Any, context: Any) -> ScoreResponse:
        await asyncio.sleep(30)
        raise AssertionError


class Answers(Beauty):
    """What a function makes of the right scores."""

    def __init__(self, change: Callable[[list[RewardScore]], list[RewardScore]]) -> None:
        self._change = change

    def scores(self, samples: list[RewardSample]) -> list[RewardScore]:
        return self._change(super().scores(samples))


class Json(grpc.GenericRpcHandler):
    """Texts in place of messages."""

    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b'{"scores": ["0.5", "very good"]}'

        return grpc.unary_unary_rpc_method_handler(answer)


def serving(service: RewardServiceServicer | Json | None, folder: Path | None = None, limit: int = 2**26) -> Server:
    """A gRPC server; of no service at all where that is None, with TLS where there is a folder of certificates."""

    @asynccontextmanager
    async def started() -> AsyncIterator[str]:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", limit)])
        if isinstance(service, RewardServiceServicer):
            add_RewardServiceServicer_to_server(service, server)
        elif service is not None:
            server.add_generic_rpc_handlers((service,))
        if folder is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            pair = ((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    return started


def speaking(greeting: bytes) -> Server:
    """A TCP server that says this, whatever it is sent, and nothing more."""

    @asynccontextmanager
    async def started() -> AsyncIterator[str]:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            await asyncio.sleep(0 if greeting else 30)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    return started


@asynccontextmanager
async def nobody() -> AsyncIterator[str]:
    """An address where nothing listens."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    yield f"127.0.0.1:{port}"


async def asked(server: Server, deadline_s: float = 20.0) -> dict[str, Answer]:
    """Asks the reward `beauty`, whose service is called `judge`. Raises what the rewards raise."""
    async with server() as address:
        job_rewards = JobRewards(StaticDirectory({"judge": address}), deadline_s)
        try:
            async with asyncio.timeout(60):
                return await job_rewards.ask("beauty", RewardPart(service="judge"), SAMPLES)
        finally:
            await job_rewards.close()


async def said_of(server: Server, deadline_s: float = 20.0) -> str:
    with pytest.raises(RewardFailure) as caught:
        await asked(server, deadline_s)
    return str(caught.value)


HTTP_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
INTERNAL, INVALID = grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (nobody, PLACE + r"cannot be reached .*: start it, or correct its address \(the controller's --reward"),
        (speaking(HTTP_500), PLACE + r"cannot be reached .*correct its address \(the controller's --reward"),
        (serving(None), PLACE + r"is no flowfleet\.v1\.RewardService .*correct it \(the controller's --reward"),
        (serving(Json()), r"service 'judge' at .* answers, but not with messages of flowfleet\.v1\.RewardService"),
        (serving(Newer()), r"rewards\.beauty: service 'judge' speaks contract 3 .* this controller knows 2: upgrade"),
        (serving(Ends(INTERNAL, "boom")), PLACE + r"failed with INTERNAL \(boom\): its log may have the reason"),
        (serving(Ends(INVALID, "params.x is unknown")), PLACE + "refuses the request: params.x is unknown"),
        (serving(Beauty(), limit=2**19), PLACE + r"takes no more \(.*larger than.*: raise its limit for received"),
    ],
    ids=["nobody", "http 500", "other service", "json", "newer", "500", "refused", "huge"],
)
async def test_a_service_that_fails_as_a_whole_is_told_in_words(server: Server, words: str) -> None:
    said = await said_of(server)
    assert re.search(words, said), said


async def test_one_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await said_of(serving(Silent()), deadline_s=1.5)
    assert re.search(PLACE + r"gave no answer in 1\.5 s: make it faster, or raise timeouts\.score_s", said), said
    monkeypatch.setattr(reward_service, "DESCRIBE_DEADLINE_S", 1.5)
    said = await said_of(speaking(b""))  # takes the connection, and says nothing
    assert re.search(PLACE + r"did not answer Describe: .*its address \(the controller's --reward", said), said


async def test_tls_on_one_end_only_is_told_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Authority().issue(tmp_path / "tls")
    said = await said_of(serving(Beauty(), folder))
    assert re.search(PLACE + r"cannot be reached: \S+ speaks TLS: set FLOWFLEET_TLS_DIR", said), said
    monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(folder))
    said = await said_of(serving(Beauty()))
    assert re.search(r"speaks no TLS: set FLOWFLEET_TLS_DIR for that service as well", said), said


async def test_a_certificate_of_another_ca_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_TLS_DIR", str(Authority().issue(tmp_path / "ours")))
    said = await said_of(serving(Beauty(), Authority().issue(tmp_path / "theirs")))
    assert re.search(PLACE + r"cannot be reached: the certificate of 127\S+ is refused: ", said), said


def nan(scores: list[RewardScore]) -> list[RewardScore]:
    return [RewardScore(sample_id=one.sample_id, score=float("nan")) for one in scores]


def renamed(scores: list[RewardScore]) -> list[RewardScore]:
    return [RewardScore(sample_id=str(place), score=0.5) for place, _ in enumerate(scores)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, "the score is nan"),
        (lambda scores: [], "its sample_id is missing in the response"),
        (renamed, "missing in the response; it has sample_id '0', '1', '2', which was not sent"),
        (lambda scores: scores * 2, "its sample_id is in the response 2 times"),
        (lambda scores: [RewardScore(sample_id=one.sample_id) for one in scores], "neither score nor error"),
        (lambda scores: [RewardScore(sample_id=one.sample_id, score=40) for one in scores], "40 is outside 0 … 1"),
    ],
    ids=["nan", "none", "renamed", "twice", "empty", "out of range"],
)
async def test_rubbish_for_all_is_the_services_failure(
    change: Callable[[list[RewardScore]], list[RewardScore]], words: str
) -> None:
    said = await said_of(serving(Answers(change)))
    assert said.startswith("rewards.beauty: service 'judge' gave no usable answer")
    assert words in said
    assert "flowfleet check-reward" in said


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda scores: nan(scores[:1]) + scores[1:], "not_finite"),
        (lambda scores: scores[1:], "missing"),
        (lambda scores: [*scores, scores[0]], "duplicated"),
        (lambda scores: [RewardScore(sample_id=scores[0].sample_id, error="no face"), *scores[1:]], "error"),
    ],
    ids=["nan", "missing", "twice", "error"],
)
async def test_rubbish_for_one_costs_that_sample_alone(
    change: Callable[[list[RewardScore]], list[RewardScore]], fault: str
) -> None:
    answers = await asked(serving(Answers(change)))
    assert (answers["job/0/0/0"].score, answers["job/0/0/0"].fault) == (None, fault)
    assert [answers[f"job/0/0/{index}"].score for index in (1, 2, 3)] == [0.5] * 3
