from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

from services.reward.scorer import Outcome, Problem, Sample, Score
from services.reward.scorers.ocr import OcrParams, OcrScorer, _Columns
from services.reward.scorers.ocr.onnx_models import model_path
from services.reward.scorers.ocr.recognition import Reading, as_line
from services.reward.text import normalize
from tests.services.reward.pictures import CROP, random_words, sign


@pytest.fixture(scope="module")
def scorer() -> OcrScorer:
    return OcrScorer(num_threads=1)


def asked(word: str, image: Image.Image) -> Sample:
    return Sample.of_picture(image, f'A sign that says "{word}"')


def values(outcomes: Sequence[Outcome]) -> list[float]:
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    assert len(scores) == len(outcomes)
    return [score.value for score in scores]


def components(outcome: Outcome) -> dict[str, float]:
    assert isinstance(outcome, Score)
    return dict(outcome.components)


def independent_texts(images: Sequence[Image.Image]) -> list[str]:
    """Another reader around the same model: the part inside the frame stretched to 160 columns, greedy CTC by hand."""
    session = onnxruntime.InferenceSession(str(model_path("rec")), providers=["CPUExecutionProvider"])
    alphabet = [*session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    crops = [np.asarray(image.crop((3, 8, 61, 56)).resize((160, 48), Image.Resampling.BICUBIC)) for image in images]
    batch = (np.stack(crops).astype(np.float32)[..., ::-1] / 127.5 - 1.0).transpose(0, 3, 1, 2)
    (rows,) = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(batch)})
    collapsed = [[symbol for symbol, _ in itertools.groupby(row.argmax(-1)) if symbol] for row in rows]
    return ["".join(alphabet[symbol - 1] for symbol in symbols) for symbols in collapsed]


def test_a_video_scores_the_mean_of_its_frames(scorer: OcrScorer) -> None:
    images = [sign(word, seed) for seed, word in enumerate(("AB3", "AB3", "XYZ"))]
    params, prompt = scorer.parse({"crop": CROP}), 'A sign that says "AB3"'
    video = Sample(np.stack([np.asarray(image) for image in images]), prompt)
    (outcome, *alone) = scorer.score([video, *(asked("AB3", image) for image in images)], params)
    assert values([outcome])[0] == pytest.approx(np.mean(values(alone)))
    assert min(values(alone)) < values([outcome])[0] < max(values(alone))
    for name, mean in components(outcome).items():
        assert mean == pytest.approx(np.mean([components(one)[name] for one in alone]))


def test_signs_are_read_as_well_as_by_the_wide_reader(scorer: OcrScorer) -> None:
    words = random_words(64)
    images = [sign(word, seed) for seed, word in enumerate(words)]
    params = scorer.parse({"crop": CROP, "alphanumeric": "true"})
    outcomes = scorer.score([asked(word, image) for word, image in zip(words, images, strict=True)], params)
    exact = np.mean([components(outcome)["exact"] for outcome in outcomes])
    texts = [re.sub(r"\W", "", text).lower() for text in independent_texts(images)]
    wide = np.mean([word.lower() in text for word, text in zip(words, texts, strict=True)])
    assert wide > 0.85
    assert exact >= wide - 2 / 64


def test_score_is_one_minus_distance_over_length(scorer: OcrScorer) -> None:
    image = sign("WXYZ")
    outcomes = scorer.score(
        [asked(word, image) for word in ("WXYZ", "wx yz", "WXYB", "WABZ", "3333", "XY")], OcrParams()
    )
    assert values(outcomes) == [1.0, 1.0, 0.75, 0.5, 0.0, 1.0]
    assert [components(outcome)["distance"] for outcome in outcomes] == [0.0, 0.0, 1.0, 2.0, 4.0, 0.0]
    assert [components(outcome)["exact"] for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_soft_score_ranks_the_right_word_first_and_stays_in_range(scorer: OcrScorer) -> None:
    image = sign("K7QX")
    params = scorer.parse({"score": "soft", "crop": CROP})
    right, near, far, unknown = values(
        scorer.score([asked(word, image) for word in ("K7QX", "K7QB", "3333", "\ue000")], params)
    )
    assert 0.9 < right <= 1.0
    assert right > near > far > 0.0
    assert unknown == 0.0


def test_an_empty_board_scores_zero(scorer: OcrScorer) -> None:
    (outcome,) = scorer.score([asked("K7QX", Image.new("RGB", (64, 64), "white"))], OcrParams())
    assert values([outcome]) == [0.0]
    assert components(outcome)["confidence"] == 0.0


def test_a_score_does_not_depend_on_its_neighbors(scorer: OcrScorer) -> None:
    """Bit for bit, whatever shares the batch: alone, with an equal width, in a full batch, with other widths."""
    params = scorer.parse({"score": "soft"})
    subject = asked("K7QX", sign("K7QX"))
    others = [asked(word, sign(word, seed)) for seed, word in enumerate(random_words(18, seed=3))]
    wide = asked("K7QX", sign("K7QX").resize((200, 48)))
    alone = scorer.score([subject], params)[0]
    assert scorer.score([subject, others[0]], params)[0] == alone
    assert scorer.score([*others, wide, subject], params)[-1] == alone
    assert scorer.score([wide, subject], params)[1] == alone


def test_a_prompt_without_quotes_is_that_samples_problem(scorer: OcrScorer) -> None:
    image = sign("ABC")
    outcomes = scorer.score(
        [asked("ABC", image), Sample.of_picture(image, "no target"), asked("ABC", image)], OcrParams()
    )
    assert isinstance(outcomes[1], Problem)
    assert outcomes[1].reason == "prompt"
    assert values([outcomes[0], outcomes[2]]) == [1.0, 1.0]


def test_the_crop_chooses_the_text(scorer: OcrScorer) -> None:
    both = Image.new("RGB", (128, 64))
    both.paste(sign("ABCD"), (0, 0))
    both.paste(sign("WXYZ"), (64, 0))
    for crop, word in (("0.02,0.1,0.48,0.9", "ABCD"), ("0.52,0.1,0.98,0.9", "WXYZ")):
        params = scorer.parse({"crop": crop, "alphanumeric": "true"})
        assert values(scorer.score([asked("ABCD", both), asked("WXYZ", both)], params)) == [
            float(word == "ABCD"),
            float(word == "WXYZ"),
        ]


def test_lines_keep_their_aspect_between_the_limits() -> None:
    assert as_line(Image.new("RGB", (64, 64)), (0.0, 0.0, 1.0, 1.0), 80).shape == (3, 48, 80)
    assert as_line(Image.new("RGB", (640, 96)), (0.0, 0.0, 1.0, 1.0), 80).shape == (3, 48, 320)
    assert as_line(Image.new("RGB", (640, 96)), (0.5, 0.0, 1.0, 1.0), 80).shape == (3, 48, 160)
    assert as_line(Image.new("RGB", (9000, 1)), (0.0, 0.0, 1.0, 1.0), 80).shape == (3, 48, 2048)


def test_lines_are_bgr_between_minus_one_and_one() -> None:
    line = as_line(Image.new("RGB", (64, 64), (255, 0, 51)), (0.0, 0.0, 1.0, 1.0), 80)
    assert line.dtype == np.float32
    np.testing.assert_allclose(line[:, 20, 40], [51 / 127.5 - 1, -1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"corp": "0,0,1,1"},
            r"params\.corp is unknown: this scorer takes region, crop, alphanumeric, score, min_width",
        ),
        ({"region": "paragraph"}, r"params\.region = 'paragraph': say one of line, page"),
        ({"detection_size": "31"}, "32 … 2048 pixels"),
        ({"detection_size": "big"}, r"params\.detection_size"),
        ({"crop": "0,0,1"}, r"params\.crop = '0,0,1': say left,top,right,bottom"),
        ({"crop": "0.5,0,0.5,1"}, "left < right"),
        ({"crop": "0,0,nan,1"}, "fractions"),
        ({"crop": "a,b,c,d"}, r"params\.crop"),
        ({"alphanumeric": "yes"}, "true, false"),
        ({"score": "hard"}, "edit, soft"),
        ({"min_width": "0"}, "8 … 2048"),
        ({"min_width": "wide"}, r"params\.min_width"),
    ],
)
def test_bad_parameters_say_what_to_change(scorer: OcrScorer, params: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scorer.parse(params)


def test_parameters_have_one_value_however_they_are_written(scorer: OcrScorer) -> None:
    assert scorer.parse({"crop": "0, 0, 1, 1", "alphanumeric": "False"}) == scorer.parse({}) == OcrParams()
    assert hash(scorer.parse({"score": "soft"})) != hash(OcrParams())


ALPHABET = ["blank", "a", "b", ".", " "]


def spelt_by_enumeration(frames: NDArray[np.float32], target: str, alphanumeric: bool) -> float:
    """Sum over all paths whose collapsed, normalized text is the target."""
    total = 0.0
    for path in itertools.product(range(len(ALPHABET)), repeat=len(frames)):
        text = "".join(ALPHABET[symbol] for symbol, _ in itertools.groupby(path) if symbol)
        if normalize(text, alphanumeric) == target:
            total += math.prod(float(frames[t, symbol]) for t, symbol in enumerate(path))
    return total


@pytest.mark.parametrize(
    ("alphanumeric", "target"), [(True, "ab"), (True, "aa"), (False, "a."), (False, "ab"), (True, "b")]
)
def test_removed_characters_count_as_blanks_exactly(alphanumeric: bool, target: str) -> None:
    frames = np.random.default_rng(1).random((5, len(ALPHABET))).astype(np.float32)
    frames /= frames.sum(axis=1, keepdims=True)
    ours = _Columns(ALPHABET, alphanumeric).probability(Reading("", 0.0, frames), target)
    assert ours == pytest.approx(spelt_by_enumeration(frames, target, alphanumeric) ** (1 / len(target)), rel=1e-5)


def test_both_cases_of_a_letter_count() -> None:
    frames = np.array([[0.1, 0.5, 0.4]], dtype=np.float32)
    ours = _Columns(["blank", "a", "A"], False).probability(Reading("", 0.0, frames), "a")
    assert ours == pytest.approx(0.9, rel=1e-6)
