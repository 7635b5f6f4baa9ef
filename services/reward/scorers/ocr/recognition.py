"""Reads lines of text with RapidOCR's recognition model (PP-OCRv6, the ONNX file inside the `rapidocr` wheel).

RapidOCR's own recognizer pads a batch to its widest line, so that a reading depends on its neighbors, and shrinks
without smoothing. Here each picture is scaled by itself and a batch holds equal widths only; running the session and
decoding its output are RapidOCR's.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.reward.scorers.ocr.onnx_models import rapidocr_config

LINE_HEIGHT = 48
"""Height in pixels that the model was trained on."""

MAX_LINE_WIDTH = 2048
"""Longer lines are squeezed."""

WIDTH_STEP = 8
"""The model makes one frame of 8 columns."""

BATCH_SIZE = 16
"""Lines in one run of the model: more are not faster, and 18,710 probabilities a frame take memory."""

Box = tuple[float, float, float, float]

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Reading:
    """Text of a line, mean probability of its characters (0 for none), and probabilities (frames, alphabet) fp32."""

    text: str
    confidence: float
    probabilities: NDArray[np.float32]


class LineReader:
    """The recognition model on `num_threads` CPU threads, which sleep while there is nothing to read."""

    def __init__(self, num_threads: int) -> None:
        self._recognizer = _rapidocr_recognizer(num_threads)
        self.alphabet: list[str] = self._recognizer.postprocess_op.character
        """The blank's name, then the characters that the other columns of the probabilities stand for."""

    def read(self, lines: Sequence[NDArray[np.float32]]) -> Iterator[tuple[int, Reading]]:
        """Readings of `lines` (from `as_line`) with their index, in no particular order."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for index, line in enumerate(lines):
            by_width[line.shape[2]].append(index)
        for indices in by_width.values():
            for start in range(0, len(indices), BATCH_SIZE):
                part = indices[start : start + BATCH_SIZE]
                yield from zip(part, self._read_batch([lines[index] for index in part]), strict=True)

    def read_alone(self, line: NDArray[np.float32]) -> Reading:
        """The reading of one line (from `as_line`). Its last bits differ from those of `read`, which fills batches."""
        return self._readings(line[None])[0]

    def _read_batch(self, lines: Sequence[NDArray[np.float32]]) -> list[Reading]:
        """A single line goes in twice: a batch of one takes other matrix kernels, whose last bits differ."""
        batch = np.stack(lines if len(lines) > 1 else [*lines, *lines])
        return self._readings(batch)[: len(lines)]

    def _readings(self, batch: NDArray[np.float32]) -> list[Reading]:
        probabilities = self._recognizer.session(batch)
        texts, _ = self._recognizer.postprocess_op(probabilities)
        return [Reading(text, confidence, row) for (text, confidence), row in zip(texts, probabilities, strict=True)]


def as_line(image: Image.Image, crop: Box, min_width: int) -> NDArray[np.float32]:
    """The model's input for a part of an RGB picture: (3, 48, width) fp32, BGR, −1 … 1.

    `crop` is left, top, right, bottom as fractions of the picture. The part keeps its aspect unless it is narrower
    than `min_width` columns at 48 rows: then it is stretched, for each frame of 8 columns can hold one character only.
    """
    left, top, right, bottom = crop
    box = (left * image.width, top * image.height, right * image.width, bottom * image.height)
    natural = LINE_HEIGHT * (box[2] - box[0]) / (box[3] - box[1])
    width = WIDTH_STEP * math.ceil(min(max(natural, min_width), MAX_LINE_WIDTH) / WIDTH_STEP)
    scaled = np.asarray(image.resize((width, LINE_HEIGHT), Image.Resampling.BICUBIC, box=box), dtype=np.float32)
    return np.ascontiguousarray(scaled[:, :, ::-1].transpose(2, 0, 1)) / np.float32(127.5) - np.float32(1.0)


def _rapidocr_recognizer(num_threads: int) -> Any:
    from rapidocr.ch_ppocr_rec import TextRecognizer

    settings = {"rec_batch_num": BATCH_SIZE, "rec_img_shape": [3, LINE_HEIGHT, MAX_LINE_WIDTH]}
    return TextRecognizer(rapidocr_config("rec", num_threads, settings))
