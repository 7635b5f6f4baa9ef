"""What the tiny judge is taught, by drawn signs whose answers are known, and the recipes around it."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowfleet.algorithms.settings import AdvantageSettings
from flowfleet.job.spec import load_job
from recipes.tiny_vlm.lessons import draw_lesson, is_high, word_rise
from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from recipes.tiny_vlm.teach import RUBRIC, Lessons, teach
from services.reward.judge.media import Picture
from services.reward.judge.messages import chat_request, filled
from services.reward.judge.rubrics import load_rubric

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> TinyVlm:
    return TinyVlm.load(make_tiny_vlm(tmp_path_factory.mktemp("vlm")))


@pytest.mark.parametrize("board", [(25, 25, 28), (245, 210, 70)])
@pytest.mark.parametrize(("top", "bottom"), [(10, 22), (24, 40), (38, 50)])
def test_a_words_rise_is_that_of_its_middle(board: tuple[int, int, int], top: int, bottom: int) -> None:
    sign = np.full((64, 64, 3), board, np.uint8)
    sign[2:4] = sign[60:62] = 130  # the frame does not count
    sign[top:bottom, 12:50:4] = 255 - np.array(board, np.uint8)
    assert word_rise(sign) == pytest.approx((32 - (top + bottom) / 2) / 32)
    assert is_high(sign) == (top + bottom < 64)


def test_a_blank_sign_has_no_rise() -> None:
    assert word_rise(np.full((64, 64, 3), 200, np.uint8)) == 0.0


def test_lessons_are_balanced_and_repeat() -> None:
    first, again = ([np.asarray(draw_lesson(rng)) for _ in range(200)] for rng in (random.Random(3), random.Random(3)))
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert 0.35 < np.mean([is_high(sign) for sign in first]) < 0.65
    rises = [word_rise(sign) for sign in first]
    assert min(rises) < -0.35  # further than the painter goes, ± 16 of 128
    assert max(rises) > 0.35


def test_the_judge_is_taught_the_question_that_the_scorer_sends(vlm: TinyVlm) -> None:
    rubric, rng = load_rubric(str(RUBRIC)), random.Random(0)
    picture = next(sign for sign in (draw_lesson(rng) for _ in range(100)) if is_high(np.asarray(sign)))
    parts = filled(rubric, {}, {"image": [Picture.of(_png(picture), "image/png")]})
    sent = json.loads(chat_request("m", rubric.system, parts, {}).body)["messages"]
    expected = vlm.encode(sent, [picture], "Yes")
    lesson, truth = Lessons(vlm, rubric, 0).of([picture])
    assert truth.tolist() == [1]
    assert torch.equal(lesson["input_ids"], expected["input_ids"][:, :-1])  # but for the end, which is to be predicted
    assert torch.equal(lesson["pixel_values"], expected["pixel_values"])


def test_equal_seeds_teach_equal_weights(vlm: TinyVlm, tmp_path: Path) -> None:
    weights = []
    for name in ("first", "again"):
        pupil = TinyVlm.load(make_tiny_vlm(tmp_path / name))
        teach(pupil, Lessons(pupil, load_rubric(str(RUBRIC)), 0), 2, 4, 1e-3)
        weights.append(pupil.model.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not all(torch.equal(weights[0][key], value) for key, value in vlm.model.state_dict().items())


def test_the_guarded_recipe_is_the_hacked_one_with_guards() -> None:
    hacked, guarded = (load_job(RECIPES / f"tiny_{name}.toml").model_dump() for name in ("hacked", "guarded"))
    assert hacked["rewards"]["ocr"]["weight"] == 0.0
    hacked["name"] = guarded["name"]
    hacked["algorithm"]["reward_combination"] = "normalized"
    hacked["rewards"]["ocr"]["weight"] = 2.0
    hacked["rewards"]["image_quality"]["gate"] = {"below": 0.7, "above": None, "action": "mask"}
    assert hacked == guarded


def test_the_judges_recipe_weighs_the_judge_and_the_letters_alike() -> None:
    job = load_job(RECIPES / "tiny_judge.toml")
    assert {name: part.weight for name, part in job.rewards.items()} == {"judge": 1.0, "ocr": 1.0}
    assert job.algorithm.of(AdvantageSettings).reward_combination == "normalized"


def _png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()
