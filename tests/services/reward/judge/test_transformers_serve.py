"""Hugging Face's `transformers serve` as a judge: it takes a request for log-probabilities, and gives none."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.errors import Unavailable
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.requests import EncodedSample
from recipes.tiny_vlm.lessons import draw_lesson, is_high, word_rise
from recipes.tiny_vlm.teach import RUBRIC
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import VlmSettings
from services.reward.scorer import Outcome, Problem
from services.reward.scorers.vlm import VlmScorer
from tests.judge_processes import PATIENCE, START_S, teach
from tests.services.reward.conftest import reward_process

pytestmark = pytest.mark.long

PROCESSOR = """
from transformers import Qwen2_5_VLProcessor


class PictureProcessor(Qwen2_5_VLProcessor):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, None, chat_template)
"""
"""Qwen2.5-VL's without videos, which need torchvision."""


@dataclass(frozen=True)
class HuggingFaceServer:
    url: str
    model: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HuggingFaceServer]:
    """`transformers serve` of a judge that was taught whether a word is above the middle of its sign."""
    folder = tmp_path_factory.mktemp("serve")
    model, log = folder / "model", folder / "log"
    teach(model, 150)
    (model / "pictures.py").write_text(PROCESSOR)
    (model / "processor_config.json").write_text(
        json.dumps({"auto_map": {"AutoProcessor": "pictures.PictureProcessor"}})
    )
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model), "--trust-remote-code"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--host", "127.0.0.1", "--port", "0"],
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"Uvicorn running on (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield HuggingFaceServer(f"{found[1]}/v1", str(model))
    finally:
        process.kill()
        process.wait()


def signs(count: int) -> list[Image.Image]:
    """Signs, as many high as low, none of them near the middle."""
    rng = random.Random(7)
    found: dict[bool, list[Image.Image]] = {True: [], False: []}
    while min(map(len, found.values())) < count // 2:
        sign = draw_lesson(rng)
        if abs(word_rise(np.asarray(sign))) > 0.25:
            found[is_high(np.asarray(sign))].append(sign)
    return [sign for pair in zip(*found.values(), strict=False) for sign in pair][:count]


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def test_the_service_scores_by_the_word(server: HuggingFaceServer, tmp_path: Path) -> None:
    shown = signs(6)
    samples = [
        RewardSample(sample_id=str(number), media=png(sign), media_type="image/png", prompt="a sign")
        for number, sign in enumerate(shown)
    ]
    settings = {"urls": server.url, "model": server.model, "rubric": RUBRIC, **PATIENCE}
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with (
        reward_process(tmp_path, "--scorer", "vlm", *flags) as service,
        grpc.insecure_channel(service.address) as channel,
    ):
        scores = RewardServiceStub(channel).Score(ScoreRequest(samples=samples), timeout=300).scores
        assert [score.score for score in scores] == [float(is_high(np.asarray(sign))) for sign in shown]
        assert [dict(score.components) for score in scores] == [{"by_logprobs": 0.0}] * len(shown)
        assert service.metric("flowfleet_reward_judge_answers_total", outcome="parsed") == len(shown)
        assert service.metric("flowfleet_reward_judge_tokens_total", kind="completion") == 2 * len(shown)


async def score(server: HuggingFaceServer, **changes: Any) -> list[Outcome]:
    given = {"urls": server.url, "model": server.model, "rubric": str(RUBRIC), **PATIENCE} | changes
    scorer = VlmScorer(VlmSettings.read(given), JudgeMetrics(CollectorRegistry()))
    await scorer.start()
    try:
        return await scorer.score([EncodedSample(png(signs(2)[0]), "image/png", "a sign", {}, "g", "0")], ())
    finally:
        await scorer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": "require"}, r"gave no log-probabilities .*settings.logprobs"),
        ({"model": "judge"}, r"answered 400: Server is pinned to .*settings.model is 'judge'"),
    ],
)
async def test_settings_that_it_cannot_serve(server: HuggingFaceServer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        await score(server, **changes)


async def test_an_answer_off_the_scale_and_a_field_that_it_does_not_know(server: HuggingFaceServer) -> None:
    (rated,) = await score(server, rubric="quality", max_parse_failures=1.0)
    (refused,) = await score(server, extra={"top_k": 1})
    assert isinstance(rated, Problem)
    assert isinstance(refused, Problem)
    assert "is not on the scale 1-5" in rated.message
    assert re.search(r"answered 422: Unexpected fields .*top_k.*settings.extra", refused.message)
