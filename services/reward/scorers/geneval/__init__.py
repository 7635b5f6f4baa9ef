"""`geneval`: does the picture show what it should: so many objects, in these colors, at these places?

A detector looks for the objects, and a CLIP model, where `settings.clip` names one, says their colors: each object is
cut out and compared with three sentences a color ("a photo of a red bench", "a photo of a red-colored bench", "a photo
of a red object"), whose embeddings are averaged; the most alike of ten colors is its own. What is asked stands in
`metadata.geneval` as JSON, a line of geneval's evaluation_metadata.jsonl:

    {"tag": "position", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 2, "color": "black",
     "position": ["left of", 0]}], "exclude": [{"class": "dog", "count": 3}]}

`rules` has the rules and formulas. The benchmark's own detector is a Mask2Former of mmdetection, which also
masks what is around an object before its color is looked at; here its box is cut out. Of a video, score and components
are the means over at most 8 evenly spaced frames.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from pydantic import Field, field_validator

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward.networks.checkpoints import Checkpoint, check_checkpoint, check_processor
from services.reward.networks.encoders import ClipEncoder, unit
from services.reward.networks.torch_models import ModelSettings, prepare_torch
from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer, mean_score, one_of, read_params
from services.reward.scorers.geneval.detectors import CLOSED_TYPES, OPEN_TYPES, Detector, Found, make_detector
from services.reward.scorers.geneval.rules import (
    COLORS,
    SCORES,
    Box,
    Request,
    is_correct,
    judge,
    kept,
    needs_colors,
    read_request,
)

SENTENCES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
COUNTING = "counting"
"""The tag whose objects must be more certain."""


class GenevalSettings(ModelSettings):
    """`model` is the detector's folder. The defaults are geneval's."""

    clip: Checkpoint | None = None
    """CLIP model that names colors (geneval: ViT-L/14); unset: requests with colors get no score."""
    threshold: float = Field(default=0.3, ge=0.0, lt=1.0)
    """Certainty above which an object counts. OWL-ViT and OWLv2 need about 0.1."""
    counting_threshold: float = Field(default=0.9, ge=0.0, lt=1.0)
    """`threshold` for requests with the tag "counting"."""
    max_objects: int = Field(default=16, ge=1)
    """Maximum objects of a class, the most certain."""
    max_overlap: float = Field(default=1.0, gt=0.0, le=1.0)
    """Overlap (IoU) above which the less certain of two objects is dropped. Detectors that find objects twice need
    about 0.7."""
    position_threshold: float = Field(default=0.1, ge=0.0)
    """Minimum distance that makes a position, as a share of both objects' sizes."""
    query: str = "a photo of a {}"
    """Query for OWL-ViT and OWLv2; the class replaces the braces."""

    @field_validator("query")
    @classmethod
    def _has_braces(cls, query: str) -> str:
        if query.count("{}") != 1 or query.count("{") != 1 or query.count("}") != 1:
            raise ValueError("write {} once, where the class goes, and no other braces")
        return query


class GenevalScorer(Scorer[str]):
    """Components: `partial`, `strict`, `correct`, and of what was asked the means `count`, `color`, `position` and
    `exclude`. `params.score` (default "partial") says which of the first three is the score."""

    name = "geneval"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    components = (*SCORES, "count", "color", "position", "exclude")
    call_bytes = 0

    def __init__(self, settings: GenevalSettings, num_threads: int) -> None:
        self._model_type = str(check_checkpoint(settings.model, "model", OPEN_TYPES + CLOSED_TYPES)["model_type"])
        is_open = self._model_type in OPEN_TYPES
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=is_open)
        if settings.clip is not None:
            check_checkpoint(settings.clip, "clip", ("clip",))
            check_processor(settings.clip, "clip", tokenizer=True)
        self.version, self.pinned = settings.version(1), settings.pinned
        self.score_range = (min(0.0, 2.0 - settings.max_objects), 1.0)  # one is wanted, as many as can be are found
        self._settings = settings
        self._num_threads = num_threads
        self._detector: Detector
        self._encoder: ClipEncoder | None = None

    def start(self) -> None:
        prepare_torch(self._num_threads)
        self._detector = make_detector(self._settings, self._model_type, self._settings.query)
        if self._settings.clip is not None:
            self._encoder = ClipEncoder(self._settings, self._settings.clip, "clip", self._num_threads)

    def parse(self, params: Mapping[str, str]) -> str:
        return str(read_params(params, {"score": one_of(*SCORES)}).get("score", "partial"))

    def score(self, samples: Sequence[Sample], params: str) -> list[Outcome]:
        requests = [self._request(sample) for sample in samples]
        asked = [
            (index, request, picture)
            for index, (sample, request) in enumerate(zip(samples, requests, strict=True))
            if isinstance(request, Request)
            for picture in sample.pictures()
        ]
        scores: dict[int, list[Score]] = {index: [] for index, *_ in asked}
        judged = self._judge([request for _, request, _ in asked], [picture for *_, picture in asked], params)
        for (index, *_), score in zip(asked, judged, strict=True):
            scores[index].append(score)
        return [
            request if isinstance(request, Problem) else mean_score(scores[index])
            for index, request in enumerate(requests)
        ]

    def _request(self, sample: Sample) -> Request | Problem:
        try:
            request = read_request(sample.metadata)
        except ValueError as error:
            return Problem("metadata", str(error))
        if unknown := self._detector.unknown(request.names):
            return Problem(
                "metadata", f"the detector knows no {', '.join(unknown)}: set another model, or other prompts"
            )
        if self._encoder is None and any(wanted.color for wanted in request.include):
            return Problem("metadata", "a color is asked for: set settings.clip to the folder of a CLIP model")
        return request

    def _judge(self, requests: Sequence[Request], pictures: Sequence[Image.Image], score: str) -> list[Score]:
        if not requests:
            return []
        found = self._find(requests, pictures)
        colors = self._colors(requests, found, pictures)
        return [self._answer(*one, score) for one in zip(requests, found, colors, strict=True)]

    def _find(self, requests: Sequence[Request], pictures: Sequence[Image.Image]) -> list[Found]:
        settings = self._settings
        lowest = min(settings.threshold, settings.counting_threshold)
        keep = partial(kept, max_objects=settings.max_objects, max_overlap=settings.max_overlap)
        everything = self._detector.detect(pictures, [request.names for request in requests], lowest)
        thresholds = [
            settings.counting_threshold if request.tag == COUNTING else settings.threshold for request in requests
        ]
        return [
            {name: keep(objects, threshold) for name, objects in found.items()}
            for found, threshold in zip(everything, thresholds, strict=True)
        ]

    def _colors(
        self, requests: Sequence[Request], found: Sequence[Found], pictures: Sequence[Image.Image]
    ) -> list[dict[int, list[str]]]:
        """The colors that decide, of each picture: one forward pass for all objects."""
        crops: list[Image.Image] = []
        names: list[str] = []
        owners: list[tuple[int, int]] = []
        for place, (request, objects, picture) in enumerate(zip(requests, found, pictures, strict=True)):
            for index, ones in needs_colors(request, objects).items():
                crops += [cut_out(picture, one.box) for one in ones]
                names += [request.include[index].name] * len(ones)
                owners += [(place, index)] * len(ones)
        colors: list[dict[int, list[str]]] = [{} for _ in requests]
        if self._encoder is not None and crops:
            for (place, index), color in zip(owners, name_colors(self._encoder, crops, names), strict=True):
                colors[place].setdefault(index, []).append(color)
        return colors

    def _answer(self, request: Request, found: Found, colors: Mapping[int, Sequence[str]], score: str) -> Score:
        threshold = self._settings.position_threshold
        answer = judge(request, found, colors, threshold)
        values = {
            "partial": answer.partial,
            "strict": float(answer.strict),
            "correct": float(is_correct(request, found, colors, threshold)),
        }
        criteria = {
            "count": answer.counts,
            "color": answer.colors,
            "position": answer.positions,
            "exclude": answer.excluded,
        }
        asked = {name: fmean(numbers) for name, numbers in criteria.items() if numbers}
        return Score(values[score], values | asked)


def cut_out(picture: Image.Image, box: Box) -> Image.Image:
    """The part in a box, to whole pixels, one at least."""
    left, top = min(round(box[0]), picture.width - 1), min(round(box[1]), picture.height - 1)
    return picture.crop((left, top, max(round(box[2]), left + 1), max(round(box[3]), top + 1)))


def name_colors(encoder: ClipEncoder, crops: Sequence[Image.Image], names: Sequence[str]) -> list[str]:
    """The color of each object, of a class each."""
    classifiers = {name: _classifier(encoder, name) for name in dict.fromkeys(names)}
    vectors = encoder.pictures(crops)
    return [COLORS[int((classifiers[name] @ vector).argmax())] for name, vector in zip(names, vectors, strict=True)]


def _classifier(encoder: ClipEncoder, name: str) -> torch.Tensor:
    """(10, D) unit vectors: for each color the mean of its sentences."""
    texts = [sentence.format(color=color, name=name) for color in COLORS for sentence in SENTENCES]
    vectors, _ = encoder.texts(texts)
    return unit(vectors.view(len(COLORS), len(SENTENCES), -1).mean(dim=1))


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> Scorer[Any]:
    return GenevalScorer(GenevalSettings.read(settings), num_threads)
