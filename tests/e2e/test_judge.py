"""A job whose reward is a vision-language model behind a real HTTP server: judge, service, controller and trainer as
processes. What it learns with a judge that was taught is in docs/results.md."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowfleet.api.samples import Sample
from flowfleet.client.client import Client
from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from recipes.tiny_vlm.teach import RUBRIC, Lessons, conversation, teach
from services.reward.judge.rubrics import load_rubric
from tests.e2e.conftest import Fleet
from tests.judge_processes import JudgeService, judge_service

pytestmark = pytest.mark.long
MakeJob = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taught for seconds: it answers with yes or no, and hardly looks."""
    folder = tmp_path_factory.mktemp("vlm")
    vlm = TinyVlm.load(make_tiny_vlm(folder))
    teach(vlm, Lessons(vlm, load_rubric(str(RUBRIC)), 0), steps=40, batch_size=8, rate=1e-3)
    vlm.save(folder)
    return folder


@pytest.fixture(scope="module")
def judge(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeService]:
    """Its server turns one of ten questions away."""
    with judge_service(checkpoint, tmp_path_factory.mktemp("judge"), busy_every=10) as service:
        yield service


@pytest.fixture(scope="module")
def judged(make_fleet: Callable[..., Any], judge: JudgeService) -> Iterator[Fleet]:
    with make_fleet(rewards=(f"judge={judge.address}",)) as running:
        yield running


def share_of_yes(vlm: TinyVlm, picture: Image.Image) -> float:
    """P(yes) / (P(yes) + P(no)) of the first token, over the spellings of each, by the model itself."""
    inputs = vlm.encode(conversation(load_rubric(str(RUBRIC))), [picture])
    with torch.inference_mode():
        top = torch.log_softmax(vlm.model(**inputs).logits[0, -1].double(), -1).topk(20)
    mass = {"yes": 0.0, "no": 0.0}
    for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
        word = vlm.tokenizer.decode([token]).strip().lower()
        if word in mass:
            mass[word] += float(torch.tensor(value).exp())
    return mass["yes"] / (mass["yes"] + mass["no"])


def test_the_rewards_of_a_job_are_the_judges_and_known_pictures_are_not_asked_again(
    judged: Fleet, judge: JudgeService, checkpoint: Path, small_job: MakeJob
) -> None:
    changes = {"rewards": {"judge": {}}, "schedule.steps": 2, "schedule.validate_every": 2}
    job = judged.run(small_job(**changes))
    assert job.status == "succeeded", job.reason
    counted = judge.counters()
    samples = [*judged.client.samples(job.id), *judged.client.samples(job.id, purpose="validate")]
    scored = [sample for sample in samples if sample.scores.get("judge") is not None]
    assert len(scored) == len(samples) - sum(job.results["samples_dropped"].values())
    assert counted.get("cache/hit", 0.0) + counted["cache/miss"] >= len(scored) >= 2 * 24 + 2 * 16 - 8
    assert counted["calls/ok"] > 0
    assert counted["retries"] > 0  # a tenth was turned away
    vlm = TinyVlm.load(checkpoint)
    for sample in scored[::9]:
        assert sample.scores["judge"] == pytest.approx(
            share_of_yes(vlm, picture_of(judged.client, job.id, sample)), abs=1e-4
        )
        assert "vlm" in sample.versions["judge"]

    again = judged.run(small_job(**changes))  # the same seed paints the same pictures
    assert again.status == "succeeded", again.reason
    assert judge.counters()["cache/hit"] >= counted.get("cache/hit", 0.0) + 2 * 24


def picture_of(client: Client, job_id: str, sample: Sample) -> Image.Image:
    return Image.open(io.BytesIO(client.media(job_id, sample))).convert("RGB")
