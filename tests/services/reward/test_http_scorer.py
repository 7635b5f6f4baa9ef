"""`http` against servers that behave, and against servers that misbehave in each way."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trustme

from flowfleet.errors import Unavailable
from flowfleet.rewards.requests import EncodedSample
from services.reward.remote import http_client
from services.reward.scorer import Outcome, Problem, Score
from services.reward.scorers import http as http_scorer
from services.reward.scorers.http import HttpScorer, HttpSettings
from services.reward.scorers.http.shapes import SHAPES
from tests.services.reward.web_server import Answer, Asked, WebServer, web_server
from tests.waiting import until

T = TypeVar("T")
QUICK = {"pause_s": 0.001, "timeout_s": 20.0}


def samples(number: int) -> list[EncodedSample]:
    return [
        EncodedSample(b"\x89PNG\x00" + bytes([index]), "image/png", f'a "{index}" 看板', {"index": str(index)})
        for index in range(number)
    ]


@asynccontextmanager
async def scoring(answer: Answer, scheme: str = "http", **settings: Any) -> AsyncIterator[tuple[HttpScorer, WebServer]]:
    """A scorer with the server that it asks."""
    tls = settings.pop("tls", None)
    async with asyncio.timeout(120), web_server(answer, tls) as server:
        url = f"{scheme}://127.0.0.1:{server.port}/score"
        scorer = http_scorer.make("http", QUICK | {"url": url} | settings, 1)
        await scorer.start()
        try:
            yield scorer, server
        finally:
            await scorer.close()


async def ask(answer: Answer, number: int = 3, scheme: str = "http", **settings: Any) -> list[Outcome]:
    async with scoring(answer, scheme, **settings) as (scorer, _):
        return await scorer.score(samples(number), ())


async def complaint(answer: Answer, **settings: Any) -> str:
    with pytest.raises(Unavailable) as caught:
        await ask(answer, **settings)
    assert str(caught.value).startswith("settings.url http")
    return str(caught.value)


def said(body: bytes | tuple[int, bytes]) -> Answer:
    async def answer(asked: Asked) -> bytes | tuple[int, bytes]:
        return body

    return answer


def giving(**fields: Any) -> Answer:
    return said(json.dumps(fields).encode())


async def by_index(asked: Asked) -> bytes:
    """Tenths of the number that the prompt quotes."""
    return json.dumps({"scores": [int(text.split('"')[1]) / 10 for text in asked.json["prompts"]]}).encode()


async def test_scores_come_back_in_order_and_media_go_as_they_came() -> None:
    async with scoring(by_index, batch_size=3, extra={"strict": True}, headers={"X-Team": "red"}) as (scorer, server):
        outcomes = await scorer.score(samples(7), (("style", "plain"),))
        assert outcomes == [Score(index / 10) for index in range(7)]
        assert sorted(len(asked.json["images"]) for asked in server.asked) == [1, 3, 3]
        first = next(asked.json for asked in server.asked if '"0"' in asked.json["prompts"][0])
        assert [base64.b64decode(text) for text in first["images"]] == [sample.media for sample in samples(3)]
        assert first["metadata"] == [{"index": str(index)} for index in range(3)]
        assert first["media_types"] == ["image/png"] * 3
        assert (first["params"], first["strict"]) == ({"style": "plain"}, True)
        assert server.asked[0].headers["x-team"] == "red"


@pytest.mark.parametrize(
    ("shape", "fields", "answer"),
    [
        ("lists", {"images", "media_types", "prompts", "metadata", "params"}, {"scores": [0.5, 1]}),
        ("flow_grpo", {"images", "prompts", "meta_datas"}, {"outputs": [0.5, 1]}),
        ("flow_grpo", {"images", "prompts", "meta_datas"}, {"scores": [0.5, 1], "outputs": ["a", "b"]}),
        ("verl_omni", {"images", "prompts", "metadata"}, {"scores": [0.5, 1]}),
        (
            "flow_factory",
            {"image", "prompt", "video", "condition_images", "condition_videos", "kwargs"},
            {"rewards": [0.5, 1], "error": None},
        ),
    ],
)
def test_the_shapes_of_others(shape: str, fields: set[str], answer: dict[str, Any]) -> None:
    two = samples(2)
    body = json.loads(SHAPES[shape].body(two, {}, {}))
    assert set(body) == fields
    assert [base64.b64decode(text) for text in body[SHAPES[shape].media]] == [sample.media for sample in two]
    assert SHAPES[shape].outcomes(answer, 2, ()) == [Score(0.5), Score(1.0)]


async def test_the_single_shape_asks_sample_by_sample() -> None:
    async def answer(asked: Asked) -> bytes:
        body = asked.json
        assert base64.b64decode(body["image"]).startswith(b"\x89PNG")
        return json.dumps({"score": int(body["metadata"]["index"]), "sharpness": 0.5, "why": "text"}).encode()

    outcomes = await ask(answer, 3, shape="single", components=["sharpness"])
    assert outcomes == [Score(float(index), {"sharpness": 0.5}) for index in range(3)]


async def test_named_columns_become_components() -> None:
    outcomes = await ask(giving(scores=[1, 2], strict=[0, 1], other="x"), 2, components=["strict", "absent"])
    assert outcomes == [Score(1.0, {"strict": 0.0}), Score(2.0, {"strict": 1.0})]


async def test_no_more_requests_than_settings_concurrency_over_kept_connections() -> None:
    async def answer(asked: Asked) -> bytes:
        await asyncio.sleep(0.02)
        return await by_index(asked)

    async with scoring(answer, batch_size=1, concurrency=3) as (scorer, server):
        await asyncio.gather(*(scorer.score(samples(4), ()) for _ in range(5)))
        assert len(server.asked) == 20
        assert server.most_busy == 3
        assert server.num_connections <= 3


async def test_a_cancelled_call_leaves_the_server() -> None:
    async def never(asked: Asked) -> bytes:
        await asyncio.sleep(5)
        return b""

    async with scoring(never, batch_size=1, concurrency=3) as (scorer, server):
        call = asyncio.create_task(scorer.score(samples(3), ()))
        await until(lambda: server.busy >= 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert scorer._slots._value == 3


async def test_what_fails_for_now_is_asked_again() -> None:
    failures = iter([503, 500, 429])

    async def answer(asked: Asked) -> bytes | tuple[int, bytes]:
        status = next(failures, 200)
        return await by_index(asked) if status == 200 else (status, b"wait")

    assert await ask(answer) == [Score(0.0), Score(0.1), Score(0.2)]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("in_date", [False, True])
async def test_the_pace_that_a_server_asks_for_is_kept(
    monkeypatch: pytest.MonkeyPatch, status: int, in_date: bool
) -> None:
    times: list[float] = []

    async def post(*_: object) -> http_client.Reply:
        times.append(time.monotonic())
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)  # whole seconds: at least 1
        headers = {"Retry-After": at if in_date else "1"}
        return http_client.Reply(status if len(times) == 1 else 200, "", headers, b'{"scores": [0.5]}')

    monkeypatch.setattr(http_client, "post", post)
    scorer = HttpScorer(HttpSettings(url="http://127.0.0.1:1/score", pause_s=0.01))
    await scorer.start()
    assert await scorer.score(samples(1), ()) == [Score(0.5)]
    await scorer.close()
    assert times[1] - times[0] >= 1.0


async def test_retries_are_bounded_by_their_budget() -> None:
    async with scoring(said((500, b"")), retries=20, retry_ratio=0.1) as (scorer, server):
        calls = await asyncio.gather(*(scorer.score(samples(1), ()) for _ in range(40)), return_exceptions=True)
        assert all(isinstance(call, Unavailable) for call in calls)
        assert 40 + 10 <= len(server.asked) <= 40 + 10 + 40 * 0.1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (said((500, b"out of memory\nat 7")), r"answered status 500 \(out of memory at 7\)"),
        (said((401, b"")), r"answered status 401: set settings.headers_from_env \(no text\)"),
        (said((404, b"<html>")), "answered status 404: check the path of settings.url"),
        (said((422, b"no field images")), r"answered status 422: check settings.shape \(no field images\)"),
        (said(b"<html>welcome</html>"), r"answered no JSON \(b'<html>welcome</html>'\): is settings.url the reward's"),
        (said(pickle.dumps({"scores": [1.0]})), "it looks pickled, which is never read here"),
        (said(b"[" * 100_000), "answered no JSON"),
        (said(b"[1, 2, 3]"), r"answered JSON that is no object, but \[1, 2, 3\]: settings.shape is 'lists'"),
        (giving(scores=[1, 2]), "answered 2 values as scores for 3 samples"),
        (giving(scores="good"), "answered 'good' as scores for 3 samples"),
        (giving(grades=[1, 2, 3]), "answered no scores, but grades"),
        (giving(error="CUDA out of memory"), "answered the error 'CUDA out of memory'"),
        (said(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}"), "broke the connection"),
        (said(b"HTTP/1.1 gibberish\r\n\r\n"), "broke the connection"),
        (said((302, b"")), "answered status 302: name the address it points to"),
    ],
)
async def test_a_server_that_is_of_no_use_makes_the_call_unavailable(answer: Answer, says: str) -> None:
    assert re.search(says, await complaint(answer, retries=0))


OUT_OF_TIME = "had not answered after 0.3 s: raise settings.timeout_s, or lower settings.concurrency"


async def test_a_silent_server_runs_out_of_time() -> None:
    async def silent(asked: Asked) -> bytes:
        await asyncio.sleep(2)
        return b"{}"

    assert OUT_OF_TIME in await complaint(silent, timeout_s=0.3, retries=0)


async def test_a_slow_loris_runs_out_of_time() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.02)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    scorer = http_scorer.make("http", {"url": url, "timeout_s": 0.3, "retries": 0}, 1)
    await scorer.start()
    with pytest.raises(Unavailable, match=re.escape(OUT_OF_TIME)):
        await scorer.score(samples(1), ())
    await scorer.close()
    server.close()


async def test_one_bad_number_is_the_problem_of_its_sample() -> None:
    outcomes = await ask(said(b'{"scores": [0.5, "0.7", null]}'))
    assert outcomes[0] == Score(0.5)
    assert [one.reason for one in outcomes if isinstance(one, Problem)] == ["bad_answer"] * 2
    assert isinstance(outcomes[1], Problem)
    assert re.fullmatch(
        r"settings.url http://127.0.0.1:\d+/score gave '0.7' as score, which is no number", outcomes[1].message
    )


async def test_a_request_that_is_refused_beside_one_that_is_not_costs_its_own_samples() -> None:
    async def answer(asked: Asked) -> bytes | tuple[int, bytes]:
        return (400, b"no") if '"1"' in asked.json["prompts"][0] else await by_index(asked)

    outcomes = await ask(answer, batch_size=1)
    assert [outcomes[0], outcomes[2]] == [Score(0.0), Score(0.2)]
    assert isinstance(outcomes[1], Problem)
    assert outcomes[1].reason == "refused"
    assert "answered status 400: check settings.shape" in outcomes[1].message


async def test_a_request_that_the_server_fails_on_fails_the_call_and_the_next_try_asks_only_that() -> None:
    down = True

    async def answer(asked: Asked) -> bytes | tuple[int, bytes]:
        return (500, b"oom") if down and '"1"' in asked.json["prompts"][0] else await by_index(asked)

    async with scoring(answer, batch_size=1, retries=0) as (scorer, server):
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"answered status 500 \(oom\)"):
                await scorer.score(samples(3), ())
        assert len(server.asked) == 3 + 1
        down = False
        assert await scorer.score(samples(3), ()) == [Score(0.0), Score(0.1), Score(0.2)]
        assert len(server.asked) == 3 + 1 + 1
        await scorer.score(samples(3), ())
        assert len(server.asked) == 3 + 1 + 1 + 3  # kept for the next try alone


async def test_nobody_at_the_address() -> None:
    scorer = http_scorer.make("http", {"url": "http://127.0.0.1:1/", "retries": 1, "pause_s": 0.01}, 1)
    await scorer.start()
    with pytest.raises(Unavailable, match=r"cannot be reached .*: check the address, and that the server runs"):
        await scorer.score(samples(1), ())
    await scorer.close()


async def test_tls_is_checked_against_settings_ca(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))

    assert await ask(by_index, 1, "https", tls=tls, ca=str(ca)) == [Score(0.0)]
    with pytest.raises(Unavailable, match=r"shows a certificate that is not trusted .*: set settings.ca"):
        await ask(by_index, 1, "https", tls=tls, retries=0)
    with pytest.raises(Unavailable, match=r"does not speak TLS as asked .*: is it http:// instead"):
        await ask(by_index, 1, "https", retries=0)


async def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secret: Any = {"headers_from_env": {"Authorization": "TEST_JUDGE_KEY"}}
    monkeypatch.setenv("TEST_JUDGE_KEY", "Bearer abc\n")
    async with scoring(by_index, **secret) as (scorer, server):
        await scorer.score(samples(1), ())
    assert server.asked[0].headers["authorization"] == "Bearer abc"
    monkeypatch.delenv("TEST_JUDGE_KEY")
    with pytest.raises(ValueError, match="the environment variable TEST_JUDGE_KEY is not set"):
        await ask(by_index, **secret)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "settings.url: field required"),
        ({"url": "ftp://a/b"}, "settings.url: 'ftp://a/b' is no address: write http://HOST:PORT/PATH"),
        ({"url": "http://me:secret@a/b"}, "settings.url: an address holds no password"),
        ({"url": "http://a", "shape": "pickle"}, "settings.shape: input should be 'lists', 'flow_grpo'"),
        ({"url": "http://a", "time_out_s": 3}, "settings.time_out_s: unknown setting; did you mean timeout_s?"),
        ({"url": "http://a", "ca": "/nowhere.pem"}, "settings.ca /nowhere.pem cannot be read"),
        ({"url": "http://a", "score_min": 1, "score_max": 0}, "settings.score_min 1.0 must be below"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        http_scorer.make("http", settings, 1)
    assert "secret" not in str(caught.value)
