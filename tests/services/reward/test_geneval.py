"""`geneval`: its scorer around boxes that a test gives, and the real detectors' wiring on tiny random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import CLIPModel, CLIPProcessor, OwlViTForObjectDetection, OwlViTProcessor, YolosForObjectDetection
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer
from services.reward.scorers import make
from services.reward.scorers.geneval import GenevalScorer, GenevalSettings, cut_out
from services.reward.scorers.geneval.detectors import Found, make_detector
from services.reward.scorers.geneval.rules import COLORS, Box, Detection
from tests.tiny_models.clip import save_clip
from tests.tiny_models.detectors import save_owlvit, save_yolos

LEFT, RIGHT = (4.0, 20.0, 24.0, 40.0), (40.0, 20.0, 60.0, 40.0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def yolos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_yolos(tmp_path_factory.mktemp("yolos"))


@pytest.fixture(scope="module")
def owlvit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_owlvit(tmp_path_factory.mktemp("owlvit"))


class GivenBoxes:
    """Stands where the detector is: gives every picture the same objects."""

    def __init__(self, **objects: list[Detection]) -> None:
        self._objects = objects

    def unknown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name == "unicorn"]

    def detect(self, pictures: Sequence[Image.Image], names: Sequence[Sequence[str]], threshold: float) -> list[Found]:
        return [
            {name: [one for one in self._objects.get(name, []) if one.score > threshold] for name in part}
            for part in names
        ]


def scorer(yolos: Path, detector: GivenBoxes, **settings: Any) -> GenevalScorer:
    made = make("geneval", {"model": str(yolos), "device": "cpu", **settings}, 1)
    assert isinstance(made, GenevalScorer)
    made.start()
    made._detector = detector  # type: ignore[assignment]
    return made


def sample(picture: Image.Image, *include: dict[str, Any], **more: Any) -> Sample:
    return Sample.of_picture(picture, "", {"geneval": json.dumps({"include": include, **more})})


def picture(*boxes: tuple[Box, str]) -> Image.Image:
    made = Image.new("RGB", (64, 64), "gray")
    for box, color in boxes:
        ImageDraw.Draw(made).rectangle(box, fill=color)
    return made


def only(outcomes: list[Outcome]) -> Score:
    (outcome,) = outcomes
    assert isinstance(outcome, Score), outcome
    return outcome


def test_scores_and_components(yolos: Path) -> None:
    cats = GivenBoxes(cat=[Detection(LEFT, 0.95), Detection(RIGHT, 0.5)], dog=[Detection(RIGHT, 0.8)])
    made = scorer(yolos, cats)
    asked = sample(picture(), {"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]})
    score = only(made.score([asked], made.parse({})))
    assert score.components == {
        "partial": pytest.approx((1 + 0 + 0) / 3),
        "strict": 0.0,
        "correct": 1.0,  # the most certain cat is left of the dog
        "count": 0.5,
        "position": 0.0,
    }
    assert score.value == score.components["partial"]
    for name in ("partial", "strict", "correct"):
        assert only(made.score([asked], made.parse({"score": name}))).value == score.components[name]
    assert made.score_range == (-14.0, 1.0)
    with pytest.raises(ValueError, match=r"params\.score"):
        made.parse({"score": "other"})


def test_counting_wants_more_certainty(yolos: Path) -> None:
    made = scorer(yolos, GivenBoxes(cat=[Detection(LEFT, 0.95), Detection(RIGHT, 0.5)]))
    for tag, number in (("counting", 1), ("two_object", 2)):
        score = only(made.score([sample(picture(), {"class": "cat", "count": number}, tag=tag)], "strict"))
        assert score.value == 1.0, tag


def test_problems_are_the_samples_own(yolos: Path) -> None:
    made = scorer(yolos, GivenBoxes(cat=[Detection(LEFT, 0.95)]))
    outcomes = made.score(
        [
            sample(picture(), {"class": "cat", "count": 1}),
            Sample.of_picture(picture(), "a photo of a cat"),
            sample(picture(), {"class": "unicorn", "count": 1}),
            sample(picture(), {"class": "cat", "count": 1, "color": "red"}),
        ],
        "partial",
    )
    assert only(outcomes[:1]).value == 1.0
    messages = [outcome.message for outcome in outcomes[1:] if isinstance(outcome, Problem)]
    for message, said in zip(messages, ("metadata.geneval is missing", "unicorn", "settings.clip"), strict=True):
        assert said in message


def test_colors_by_clip(yolos: Path, clip: Path) -> None:
    """What the tiny CLIP takes for the color of each box, by transformers' own forward in float64, is right and any
    other wrong; and both objects of a picture are cut out for themselves."""
    painted = picture((LEFT, "red"), (RIGHT, "blue"))
    made = scorer(yolos, GivenBoxes(car=[Detection(LEFT, 0.9)], bus=[Detection(RIGHT, 0.9)]), clip=str(clip))
    seen = {name: color_by_hand(clip, painted, box, name) for name, box in (("car", LEFT), ("bus", RIGHT))}
    for name in seen:
        for color in COLORS:
            score = only(made.score([sample(painted, {"class": name, "count": 1, "color": color})], "strict"))
            assert score.value == float(color == seen[name]), (name, color)
    both = [{"class": name, "count": 1, "color": color} for name, color in seen.items()]
    assert only(made.score([sample(painted, *both)], "strict")).value == 1.0


def color_by_hand(clip: Path, image: Image.Image, box: Box, name: str) -> str:
    model, processor = CLIPModel.from_pretrained(clip, dtype=torch.float64), CLIPProcessor.from_pretrained(clip)
    left, top, right, bottom = map(int, box)
    crop = Image.fromarray(np.asarray(image)[top:bottom, left:right])
    similar = {}
    with torch.no_grad():
        pixels = processor(images=crop, return_tensors="pt").pixel_values.double()
        seen = model.get_image_features(pixels).pooler_output[0].numpy()
        for color in COLORS:
            texts = [
                f"a photo of a {color} {name}",
                f"a photo of a {color}-colored {name}",
                f"a photo of a {color} object",
            ]
            vectors = model.get_text_features(**processor(text=texts, padding=True, return_tensors="pt"))
            mean = sum(vector / np.linalg.norm(vector) for vector in vectors.pooler_output.numpy())
            similar[color] = float(mean @ seen / np.linalg.norm(mean))
    return max(similar, key=lambda color: similar[color])


def test_a_cut_out_has_a_pixel() -> None:
    assert cut_out(picture(), (64.0, 64.0, 64.0, 64.0)).size == (1, 1)
    assert cut_out(picture(), (0.0, 0.0, 64.0, 64.0)).size == (64, 64)


def test_a_detector_of_fixed_classes(yolos: Path) -> None:
    """Boxes of pictures of two sizes in one call are those of transformers' own forward, picture by picture."""
    settings = GenevalSettings.read({"model": str(yolos), "device": "cpu"})
    detector = make_detector(settings, "yolos", settings.query)
    assert detector.unknown(["cat", "computer mouse", "Person", "dog"]) == ["dog"]
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in ((40, 48), (64, 32), (40, 48))
    ]
    names = [["cat", "computer mouse", "person"], ["cat"], ["person", "computer mouse"]]
    found = detector.detect(images, names, 0.0)
    model, processor = YolosForObjectDetection.from_pretrained(yolos), YolosImageProcessorPil.from_pretrained(yolos)
    seen = 0
    for image, asked, objects in zip(images, names, found, strict=True):
        with torch.no_grad():
            output = model(**processor(images=image, return_tensors="pt"))
        probabilities = output.logits[0].softmax(-1)[:, :-1]
        for label, name in ((1, "person"), (2, "cat"), (3, "computer mouse")):
            expected = [
                (float(row[label]), corners(box, image))
                for row, box in zip(probabilities, output.pred_boxes[0].tolist(), strict=True)
                if int(row.argmax()) == label and name in asked
            ]
            got = objects.get(name, [])
            assert [one.score for one in got] == pytest.approx([score for score, _ in expected], abs=1e-5)
            for one, (_, box) in zip(got, expected, strict=True):
                assert one.box == pytest.approx(box, abs=1e-3)
            seen += len(got)
    assert seen > 4


def corners(box: list[float], image: Image.Image) -> Box:
    x, y, width, height = box
    left, right = (min(max(side, 0.0), 1.0) * image.width for side in (x - width / 2, x + width / 2))
    top, bottom = (min(max(side, 0.0), 1.0) * image.height for side in (y - height / 2, y + height / 2))
    return left, top, right, bottom


def test_a_detector_of_any_class(owlvit: Path) -> None:
    """Pictures of different numbers of classes in one call: what transformers finds for each alone."""
    settings = GenevalSettings.read({"model": str(owlvit), "device": "cpu", "query": "a {}"})
    detector = make_detector(settings, "owlvit", settings.query)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)) for _ in range(2)]
    names = [["red sign", "cat", "tree"], ["cat"]]
    found = detector.detect(images, names, 0.0)
    model, processor = OwlViTForObjectDetection.from_pretrained(owlvit), OwlViTProcessor.from_pretrained(owlvit)
    for image, asked, objects in zip(images, names, found, strict=True):
        queries = [[f"a {name}" for name in asked]]
        inputs = processor(text=queries, images=image, return_tensors="pt", max_length=16, truncation=True)
        with torch.no_grad():
            output = model(**inputs)
        (expected,) = processor.post_process_grounded_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor([[40, 48]]), text_labels=[asked]
        )
        for name in asked:
            scores = [
                float(score)
                for score, label in zip(expected["scores"], expected["text_labels"], strict=True)
                if label == name
            ]
            assert [one.score for one in objects.get(name, [])] == pytest.approx(scores, abs=1e-5)
        assert sum(map(len, objects.values())) == 16


def test_the_whole_of_it(owlvit: Path, yolos: Path, clip: Path) -> None:
    """Real detector and CLIP, in order, with a sample that asks for nothing between."""
    for folder, name in ((owlvit, "computer mouse"), (yolos, "computer mouse")):
        made = make("geneval", {"model": str(folder), "clip": str(clip), "device": "cpu", "threshold": 0.0}, 1)
        assert isinstance(made, Scorer)
        made.start()
        asked = sample(picture(), {"class": name, "count": 1, "color": "red"})
        outcomes = made.score([asked, Sample.of_picture(picture(), ""), asked], made.parse({}))
        assert isinstance(outcomes[1], Problem)
        assert isinstance(outcomes[0], Score)
        assert outcomes[0] == outcomes[2]
        assert set(outcomes[0].components) <= set(made.components)


def test_settings_that_cannot_work(yolos: Path, clip: Path, tmp_path: Path) -> None:
    def refused(pattern: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=pattern):
            make("geneval", {"model": str(yolos), **settings}, 1)

    refused(r"settings\.model = .*model_type = 'clip'", model=str(clip))
    refused(r"settings\.clip = .*model_type = 'yolos', this scorer takes clip", clip=str(yolos))
    refused(r"settings\.clip = .*no such folder", clip=str(tmp_path / "none"))
    refused(r"settings\.query: write \{\} once", query="a photo")
    refused(r"settings\.threshold", threshold=1.5)
