"""Rubrics put to samples through HTTP: pairs, rankings, videos, transcripts; and the tiny real model end to end."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.media.files import encode_media
from flowfleet.proto.reward_pb2 import MODALITY_TEXT, DescribeRequest, RewardSample, ScoreRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.requests import EncodedSample
from services.reward.judge.comparisons import bradley_terry
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import VlmSettings
from services.reward.scorer import Outcome, Problem, Score
from services.reward.scorers.vlm import VlmScorer
from services.reward.scorers.vlm_ocr import VlmOcrScorer, VlmOcrSettings
from tests.services.reward.conftest import reward_process
from tests.services.reward.judge.bad_server import Asked, completion, serving, status

Say = Callable[[list[Any]], bytes]


def sample(media: bytes, group: str = "g", **more: str) -> EncodedSample:
    return EncodedSample(media, "image/png", 'a sign "OPEN"', more, group, media.decode())


def shown(asked: Asked) -> list[Any]:
    """The question's parts: text, or a picture's bytes."""
    parts = asked.body["messages"][-1]["content"]
    return [
        part["text"] if part["type"] == "text" else base64.b64decode(part["image_url"]["url"].partition(",")[2])
        for part in parts
    ]


async def run(
    say: Say, rubric: str, samples: list[EncodedSample], needs_group: bool = False, **settings: Any
) -> list[Outcome]:
    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await status(200, say(shown(asked)))(asked, writer)

    async with serving(reply) as server:
        given = {"urls": server.url, "model": "judge", "rubric": rubric} | settings
        scorer = VlmScorer(VlmSettings.read(given), JudgeMetrics(CollectorRegistry()))
        assert scorer.needs_group == (needs_group or rubric in ("preference", "ranking"))
        await scorer.start()
        try:
            return await scorer.score(samples, ())
        finally:
            await scorer.close()


def pictures(parts: list[Any]) -> list[bytes]:
    return [part for part in parts if isinstance(part, bytes)]


async def test_pairs_are_asked_in_both_orders_so_that_a_bias_for_the_first_cancels() -> None:
    """The judge prefers greater numbers with P 0.9, and adds 0.08 to whatever comes first."""

    def say(parts: list[Any]) -> bytes:
        first, second = pictures(parts)
        p = (0.9 if first > second else 0.1) + 0.08
        return completion("A" if p > 0.5 else "B", ("A" if p > 0.5 else "B", {"A": math.log(p), "B": math.log(1 - p)}))

    outcomes = await run(
        say, "preference", [sample(b"2"), sample(b"1", "h"), sample(b"1"), sample(b"3"), sample(b"2", "h")]
    )
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    expected = bradley_terry(3, [(0, 1), (0, 2), (1, 2)], [0.9, 0.1, 0.1])  # of the samples 2, 1, 3
    assert [scores[place].value for place in (0, 2, 3)] == pytest.approx(expected.tolist())
    assert [scores[place].components["win_rate"] for place in (0, 2, 3)] == pytest.approx([0.5, 0.1, 0.9])
    assert scores[1].value == pytest.approx(-scores[4].value)
    assert scores[0].components["order_agreement"] == pytest.approx(1 - 0.16)
    assert scores[0].components["comparisons"] == 2


async def test_a_judge_that_always_prefers_the_first_says_nothing() -> None:
    outcomes = await run(lambda parts: completion("A"), "preference", [sample(b"1"), sample(b"2")])
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == pytest.approx([0.0, 0.0])


async def test_a_group_of_one_cannot_be_compared() -> None:
    (outcome,) = await run(lambda parts: completion("A"), "preference", [sample(b"1")])
    assert isinstance(outcome, Problem)
    assert "--max-batch" in outcome.message
    assert "held-out samples are groups of one" in outcome.message


async def test_rankings_of_shuffled_lists() -> None:
    def say(parts: list[Any]) -> bytes:
        found = pictures(parts)
        return completion(", ".join(str(found.index(one) + 1) for one in sorted(found, reverse=True)))

    group = [sample(str(n).encode()) for n in (4, 1, 3, 2)]
    outcomes = await run(say, "ranking", group)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [1.0, 0.0, 2 / 3, 1 / 3]
    many = await run(say, "ranking", [sample(str(n).encode()) for n in range(10, 30)])
    values = [outcome.value for outcome in many if isinstance(outcome, Score)]
    assert (values[0], values[-1]) == (0.0, 1.0)
    assert np.corrcoef(values, range(20))[0, 1] > 0.8


def answer(text: bytes, group: str = "g") -> EncodedSample:
    return EncodedSample(text, "text/plain", "What is 2 + 2?", {"answer": "4"}, group, text.decode(errors="replace"))


async def test_answers_are_judged_against_the_reference() -> None:
    asked: list[str] = []

    def say(parts: list[Any]) -> bytes:
        asked.extend(parts)
        return completion("Yes" if "Answer to grade: 4" in parts[0] else "No")

    found = await run(say, "answer", [answer(b"4"), answer(b"5"), answer(b"\xff")])
    assert found[:2] == [Score(1.0, {"by_logprobs": 0.0}), Score(0.0, {"by_logprobs": 0.0})]
    assert isinstance(found[2], Problem)
    assert "not UTF-8" in found[2].message
    assert all("Question: What is 2 + 2?\nReference answer: 4\n" in one for one in asked)
    settings = VlmSettings.read({"urls": "http://x/v1", "model": "m", "rubric": "answer"})
    assert VlmScorer(settings, JudgeMetrics(CollectorRegistry())).modalities == (MODALITY_TEXT,)


async def test_answers_are_compared_in_pairs(tmp_path: Path) -> None:
    orders: list[str] = []
    rubric = tmp_path / "pairs.toml"
    question = "{prompt} First: {first_answer} Second: {second_answer} Which is better?"
    rubric.write_text(f'mode = "pairwise"\nquestion = "{question}"\nscale = {{ A = 1.0, B = 0.0 }}\n')

    def say(parts: list[Any]) -> bytes:
        orders.append("".join(parts))
        return completion("A" if "First: 4" in parts[0] else "B")

    found = await run(say, str(rubric), [answer(b"4"), answer(b"5")], needs_group=True)
    assert [one.components["win_rate"] for one in found if isinstance(one, Score)] == [1.0, 0.0]
    pairs = (("4", "5"), ("5", "4"))
    asked = [question.format(prompt="What is 2 + 2?", first_answer=one, second_answer=two) for one, two in pairs]
    assert sorted(orders) == asked


async def test_a_video_is_shown_as_evenly_spaced_frames() -> None:
    frames = np.stack([np.full((64, 64, 3), level, np.uint8) for level in range(0, 250, 10)])
    media, media_type = encode_media(frames)
    seen: list[bytes] = []

    def say(parts: list[Any]) -> bytes:
        seen.extend(pictures(parts))
        return completion("Yes")

    video = EncodedSample(media, media_type, "a gray that brightens", {}, "g", "v")
    assert await run(say, "video_alignment", [video]) == [Score(1.0, {"by_logprobs": 0.0})]
    levels = [int(np.asarray(Image.open(io.BytesIO(one))).mean().round()) for one in seen]
    assert levels == pytest.approx([0, 30, 70, 100, 140, 170, 210, 240], abs=4)
    broken = EncodedSample(b"no video", media_type, "p", {}, "g", "b")
    (outcome,) = await run(say, "video_alignment", [broken])
    assert isinstance(outcome, Problem)
    assert outcome.reason == "undecodable"


async def test_an_edit_is_shown_with_its_source() -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'before').decode()}"

    def say(parts: list[Any]) -> bytes:
        assert pictures(parts) == [b"before", b"after"]
        return completion("4")

    good, bad = await run(say, "edit", [sample(b"after", source=url), sample(b"after")])
    assert good == Score(4.0, {"by_logprobs": 0.0})
    assert isinstance(bad, Problem)
    assert "metadata field source" in bad.message


@pytest.mark.parametrize(
    ("text", "value", "components"),
    [
        ("Open", 1.0, {"exact": 1.0, "distance": 0.0}),
        ("The O P E N sign", 1.0, {"exact": 1.0, "distance": 0.0}),
        ("OPAN", 0.75, {"exact": 0.0, "distance": 1.0}),
        ("", 0.0, {"exact": 0.0, "distance": 4.0}),
    ],
)
async def test_vlm_ocr_compares_what_was_read(text: str, value: float, components: dict[str, float]) -> None:
    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert shown(asked)[0] == b"1"
        assert "only the text" in shown(asked)[1]
        await status(200, completion(text))(asked, writer)

    async with serving(reply) as server:
        settings = VlmOcrSettings.read({"urls": server.url, "model": "judge"})
        scorer = VlmOcrScorer(settings, JudgeMetrics(CollectorRegistry()))
        await scorer.start()
        no_target = EncodedSample(b"1", "image/png", "no quotes")
        scored, refused = await scorer.score([sample(b"1"), no_target], scorer.parse({}))
        await scorer.close()
    assert scored == Score(value, components)
    assert isinstance(refused, Problem)
    assert refused.reason == "prompt"


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Qwen2.5-VL, tiny, behind HTTP in a process of its own."""
    folder = tmp_path_factory.mktemp("vlm")
    port_file = folder / "port"
    program = (
        "import sys; from pathlib import Path; from recipes.tiny_vlm.model import make_tiny_vlm; "
        "from recipes.tiny_vlm import server; make_tiny_vlm(sys.argv[2]); server.main()"
    )
    argv = [sys.executable, "-c", program, "--model", str(folder / "model"), "--port-file", str(port_file)]
    root = Path(__file__).parents[4]
    process = subprocess.Popen(argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        deadline = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://{port_file.read_text()}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_real_model_judges_through_the_service(tiny_server: str, tmp_path: Path) -> None:
    """Untrained, it knows neither: with min_mass = 0 what counts is the share of the two words' probabilities."""
    rubric = tmp_path / "any.toml"
    rubric.write_text('question = "{image}Does this picture show {prompt}?"\nmin_mass = 0.0\n')
    settings = tmp_path / "judge.json"
    settings.write_text(
        json.dumps(
            {"urls": [tiny_server], "model": "tiny-vlm", "rubric": str(rubric), "top_logprobs": 20, "deadline_s": 120}
            | {"timeout_s": 100, "max_parse_failures": 1.0}
        )
    )
    samples = []
    for number, color in enumerate(("red", "blue", "red")):
        out = io.BytesIO()
        Image.new("RGB", (64, 64), color).save(out, "PNG")
        samples.append(
            RewardSample(sample_id=str(number), media=out.getvalue(), media_type="image/png", prompt=f"日本 {color}")
        )
    with reward_process(tmp_path, "--scorer", "vlm", "--settings", str(settings)) as service:
        with grpc.insecure_channel(service.address) as channel:
            stub = RewardServiceStub(channel)
            described = stub.Describe(DescribeRequest(), timeout=30)
            scores = stub.Score(ScoreRequest(samples=samples), timeout=120).scores
        assert "tiny-vlm" in described.version
        assert (described.score_min, described.score_max) == (0.0, 1.0)
        assert scores[0].WhichOneof("outcome") == scores[2].WhichOneof("outcome")
        assert scores[0].score == scores[2].score
        assert service.metric("flowfleet_reward_judge_calls_total", outcome="ok") >= 2
        assert service.metric("flowfleet_reward_judge_tokens_total", kind="prompt") > 0
