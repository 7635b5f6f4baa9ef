"""`ocr`: does the picture show the text that its prompt puts between double quotes?

`params.region` says where to look: the picture (or the part that `params.crop` names) is one line of text ("line",
recognition only), or has lines of text anywhere ("page", detection and recognition), which are joined in reading order.
The score "edit" is 1 − distance / length as in `text`; "soft" is the recognizer's own probability of the target, which
rises long before a character flips and so tells samples apart where the other is flat. Of a video, score and components
are the means over at most 8 evenly spaced frames.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward.scorer import (
    Outcome,
    Problem,
    Sample,
    Score,
    Scorer,
    boolean,
    mean_score,
    number,
    one_of,
    read_params,
)
from services.reward.scorers.ocr.ctc import log_probability
from services.reward.scorers.ocr.onnx_models import model_version
from services.reward.scorers.ocr.pages import SIDE_STEP, PageReader, joined
from services.reward.scorers.ocr.recognition import MAX_LINE_WIDTH, WHOLE, WIDTH_STEP, Box, LineReader, Reading, as_line
from services.reward.text import normalize, target_of, text_distance

MAX_DETECTION_SIZE = 2048
"""Two seconds and more a picture."""


@dataclass(frozen=True)
class OcrParams:
    """The parameters of a request, all optional."""

    region: str = "line"
    """"line": the crop is one line of text. "page": it has lines anywhere."""
    crop: Box = WHOLE
    """"left,top,right,bottom" of the part to read, as fractions."""
    alphanumeric: bool = False
    """Compare letters and digits only."""
    score: str = "edit"
    """"edit": 1 − distance / length. "soft": probability of the target per character."""
    min_width: int = 80
    """Columns that narrower parts are stretched to, at 48 rows. 8 columns hold one character."""
    detection_size: int = 384
    """Pixels of the longer side for finding lines of a page. Time grows with its square."""


Read = tuple[int, Reading, Mapping[str, float]]
"""Index of the picture, what it says, and components besides those of the text."""


class OcrScorer(Scorer[OcrParams]):
    """Components: `exact` (1 where the target is contained), `distance` (characters), `confidence` (mean probability of
    the characters read), `ctc_probability` (the soft score); of a page also `lines`, how many were read."""

    name = "ocr"
    version = f"1 ({model_version()})"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = (0.0, 1.0)
    components = ("exact", "distance", "confidence", "ctc_probability", "lines")
    heavy = True

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._reader = LineReader(num_threads)
        self._columns = {flag: _Columns(self._reader.alphabet, flag) for flag in (False, True)}

    def parse(self, params: Mapping[str, str]) -> OcrParams:
        readers = {
            "region": one_of("line", "page"),
            "crop": _crop,
            "alphanumeric": boolean,
            "score": one_of("edit", "soft"),
            "min_width": number(
                int, lambda it: WIDTH_STEP <= it <= MAX_LINE_WIDTH, f"say {WIDTH_STEP} … {MAX_LINE_WIDTH} columns"
            ),
            "detection_size": number(
                int, lambda it: SIDE_STEP <= it <= MAX_DETECTION_SIZE, f"say {SIDE_STEP} … {MAX_DETECTION_SIZE} pixels"
            ),
        }
        return OcrParams(**read_params(params, readers))

    def score(self, samples: Sequence[Sample], params: OcrParams) -> list[Outcome]:
        targets = [_target(sample.prompt, params) for sample in samples]
        wanted = [
            (index, target, picture)
            for index, target in enumerate(targets)
            if not isinstance(target, Problem)
            for picture in samples[index].pictures()
        ]
        scores: dict[int, list[Score]] = defaultdict(list)
        read = self._read_pages if params.region == "page" else self._read_lines
        for position, reading, more in read([picture for *_, picture in wanted], params):
            index, target, _ = wanted[position]
            scores[index].append(self._judge(reading, target, params, more))
        return [
            target if isinstance(target, Problem) else mean_score(scores[index]) for index, target in enumerate(targets)
        ]

    @cached_property
    def _pages(self) -> PageReader:
        """Made for the first page: who reads lines alone needs no detector."""
        return PageReader(self._reader, self._num_threads)

    def _read_lines(self, pictures: Sequence[Image.Image], params: OcrParams) -> Iterator[Read]:
        lines = [as_line(picture, params.crop, params.min_width) for picture in pictures]
        return ((position, reading, {}) for position, reading in self._reader.read(lines))

    def _read_pages(self, pictures: Sequence[Image.Image], params: OcrParams) -> Iterator[Read]:
        for position, picture in enumerate(pictures):
            lines = self._pages.read(cropped(picture, params.crop), params.detection_size, params.min_width)
            yield position, joined(lines, len(self._reader.alphabet)), {"lines": float(len(lines))}

    def _judge(self, reading: Reading, target: str, params: OcrParams, more: Mapping[str, float]) -> Score:
        distance = text_distance(normalize(reading.text, params.alphanumeric), target)
        probability = self._columns[params.alphanumeric].probability(reading, target)
        components = {
            "exact": float(distance == 0),
            "distance": float(distance),
            "confidence": reading.confidence,
            "ctc_probability": probability,
            **more,
        }
        return Score(probability if params.score == "soft" else 1.0 - distance / len(target), components)


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> OcrScorer:
    return OcrScorer(num_threads)


class _Columns:
    """Which columns of the recognizer's alphabet spell a normalized character, and which spell nothing.

    Characters that normalizing removes count as blanks, which is exact. Upper and lower case of a letter count as one,
    which is exact but for paths that write both in neighboring frames.
    """

    def __init__(self, alphabet: Sequence[str], alphanumeric: bool) -> None:
        spelling: dict[str, list[int]] = defaultdict(list)
        for column, character in enumerate(alphabet):
            spelling[normalize(character, alphanumeric) if column else ""].append(column)
        self._spelling: Mapping[str, Any] = {text: np.array(columns) for text, columns in spelling.items()}

    def probability(self, reading: Reading, target: str) -> float:
        """exp(ln P(target) / len(target)), the mean probability of a character; 0 for a target that cannot be spelt."""
        frames = reading.probabilities
        none = np.array([], dtype=np.intp)
        symbols = [frames[:, self._spelling.get(character, none)].sum(axis=1) for character in target]
        repeats = np.array([a == b for a, b in zip(" " + target, target)])  # noqa: B905 - shifted by one
        log_p = log_probability(np.stack(symbols, 1, dtype=np.float64), repeats, frames[:, self._spelling[""]].sum(1))
        return min(1.0, math.exp(log_p / len(target)))


def _target(prompt: str, params: OcrParams) -> str | Problem:
    try:
        return target_of(prompt, params.alphanumeric)
    except ValueError as error:
        return Problem("prompt", str(error))


def cropped(image: Image.Image, crop: Box) -> Image.Image:
    """The part of a picture, widened to whole pixels."""
    if crop == WHOLE:
        return image
    left, top, right, bottom = crop
    box = (left * image.width, top * image.height, right * image.width, bottom * image.height)
    return image.crop((math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])))


def _crop(text: str) -> Box:
    fractions = [float(part) for part in text.split(",")]
    if len(fractions) == 4:
        left, top, right, bottom = fractions
        if 0.0 <= left < right <= 1.0 and 0.0 <= top < bottom <= 1.0:
            return left, top, right, bottom
    raise ValueError("say left,top,right,bottom as fractions of the picture, 0 ≤ left < right ≤ 1 and so on")
