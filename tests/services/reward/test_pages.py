"""`params.region = "page"`: lines of text found anywhere in a picture, and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from services.reward.scorer import Outcome, Sample, Score
from services.reward.scorers.ocr import OcrScorer, _Columns, pages
from services.reward.scorers.ocr.pages import as_detector_input, in_reading_order, joined
from services.reward.scorers.ocr.recognition import Reading
from tests.services.reward.pictures import page

POSTER = page(("Slow Down", 0.3, 0.12, 52), ("School Ahead", 0.12, 0.4, 64), ("9 to 5", 0.55, 0.75, 36), tilt=3.0)


@pytest.fixture(scope="module")
def scorer() -> OcrScorer:
    return OcrScorer(num_threads=1)


def read(scorer: OcrScorer, image: Image.Image, asked: str, **params: str) -> Score:
    sample = Sample.of_picture(image, f'A poster that says "{asked}"')
    return certain(scorer.score([sample], scorer.parse({"region": "page", **params}))[0])


def certain(outcome: Outcome) -> Score:
    assert isinstance(outcome, Score)
    return outcome


def test_the_lines_are_read_as_rapidocr_reads_them(scorer: OcrScorer) -> None:
    from rapidocr import RapidOCR

    settings = {"Global.use_cls": False, "Global.log_level": "error", "Det.limit_side_len": 512}
    theirs: Any = RapidOCR(params=settings)(np.asarray(POSTER)[:, :, ::-1])
    ours = scorer._pages.read(POSTER, detection_size=512, min_width=8)
    assert [reading.text for reading in ours] == list(theirs.txts) == ["Slow Down", "School Ahead", "9 to 5"]
    assert [reading.confidence for reading in ours] == pytest.approx(theirs.scores, abs=0.1)


@pytest.mark.parametrize(
    ("asked", "distance"),
    [
        ("Slow Down School Ahead 9 to 5", 0),
        ("school  AHEAD", 0),
        ("Slow Down School Ahead 9 to 6", 1),
        ("Slow Town School Ahead 8 to 5", 2),
        ("QQ", 2),
    ],
)
def test_the_score_compares_the_target_with_all_lines_together(scorer: OcrScorer, asked: str, distance: int) -> None:
    score = read(scorer, POSTER, asked)
    assert score.value == 1.0 - distance / len(asked.replace(" ", ""))
    assert score.components["distance"] == distance
    assert score.components["exact"] == float(distance == 0)
    assert score.components["lines"] == 3.0
    assert 0.9 < score.components["confidence"] <= 1.0
    assert set(score.components) == set(scorer.components)


@pytest.mark.parametrize("points", [18, 28, 44, 72, 110])
def test_text_of_many_sizes_is_found_anywhere(scorer: OcrScorer, points: int) -> None:
    for left, top in ((0.05, 0.05), (0.3, 0.45), (0.1, 0.7)):
        image = page(("Exit 42", left, top, points), tilt=2.0)
        assert read(scorer, image, "Exit 42").components["exact"] == 1.0


def test_a_picture_without_text_scores_zero(scorer: OcrScorer) -> None:
    for score in ("edit", "soft"):
        empty = read(scorer, page(), "Exit", score=score)
        assert empty.value == 0.0
        assert empty.components == {
            "exact": 0.0, "distance": 4.0, "confidence": 0.0, "ctc_probability": 0.0, "lines": 0.0
        }  # fmt: skip


def test_text_everywhere_is_read_up_to_a_limit(scorer: OcrScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_LINES", 2)
    score = read(scorer, POSTER, "Slow Down School Ahead")
    assert (score.components["lines"], score.value) == (2.0, 1.0)


def test_a_page_does_not_depend_on_its_neighbors(scorer: OcrScorer) -> None:
    params = scorer.parse({"region": "page"})
    samples = [
        Sample.of_picture(image, '"Exit 42"')
        for image in (page(("Exit 42", 0.2, 0.3, 60)), POSTER, page(("Exit 43", 0.1, 0.1, 90)), page())
    ]
    together = scorer.score(samples, params)
    assert together == [scorer.score([sample], params)[0] for sample in samples]
    assert together[::-1] == scorer.score(samples[::-1], params)


def test_the_crop_limits_where_text_is_looked_for(scorer: OcrScorer) -> None:
    assert read(scorer, POSTER, "Slow Down", crop="0,0,1,0.35").components["lines"] == 1.0
    assert read(scorer, POSTER, "Slow Down", crop="0,0.65,1,1").value < 0.3


def test_a_video_scores_the_mean_of_its_frames(scorer: OcrScorer) -> None:
    params = scorer.parse({"region": "page"})
    frames = np.stack([np.asarray(image) for image in (POSTER, page(), page(), POSTER)])
    mean = certain(scorer.score([Sample(frames, '"School Ahead"')], params)[0])
    assert mean.value == 0.5
    assert mean.components["lines"] == 1.5


def box(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def test_reading_goes_row_by_row_from_left_to_right() -> None:
    ordered = [box(10, 4, 40, 20), box(50, 0, 90, 24), box(8, 30, 30, 40), box(40, 33, 60, 42), box(0, 60, 9, 99)]
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(np.array(ordered, np.float32))
        np.testing.assert_array_equal(in_reading_order(shuffled), ordered)
    assert in_reading_order(np.zeros((0, 4, 2), np.float32)).shape == (0, 4, 2)


def test_the_detector_gets_whole_steps_of_bgr() -> None:
    tall = as_detector_input(Image.new("RGB", (100, 512), (255, 0, 51)), 384)
    assert tall.shape == (1, 3, 384, 64)
    assert tall.dtype == np.float32
    np.testing.assert_allclose(tall[0, :, 5, 5], [51 / 127.5 - 1, -1.0, 1.0], rtol=1e-6)
    assert as_detector_input(Image.new("RGB", (2000, 3)), 384).shape == (1, 3, 32, 384)


ALPHABET = ["blank", "a", "b"]


def frames(seed: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).random((4, len(ALPHABET))).astype(np.float32)
    drawn /= drawn.sum(axis=1, keepdims=True)
    return drawn


def test_the_probability_of_joined_lines_is_the_sum_over_all_ways_to_part_the_target() -> None:
    first, second = (Reading("", 0.0, frames(seed)) for seed in (1, 2))
    columns = _Columns(ALPHABET, alphanumeric=True)

    def alone(reading: Reading, text: str) -> float:
        if not text:
            return float(reading.probabilities[:, 0].prod())
        return columns.probability(reading, text) ** len(text)

    for target in ("ab", "aa", "b"):
        parted = sum(alone(first, target[:k]) * alone(second, target[k:]) for k in range(len(target) + 1))
        whole = columns.probability(joined([first, second], len(ALPHABET)), target) ** len(target)
        assert whole == pytest.approx(parted, rel=1e-5)


def test_the_confidence_of_joined_lines_is_that_of_their_characters() -> None:
    lines = [Reading("abc", 0.9, frames(1)), Reading("a", 0.5, frames(2)), Reading("", 0.0, frames(3))]
    whole = joined(lines, len(ALPHABET))
    assert whole.text == "abc a "
    assert whole.confidence == pytest.approx((3 * 0.9 + 0.5) / 4)
