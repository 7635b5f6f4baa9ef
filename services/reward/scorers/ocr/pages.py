"""Finds the lines of text in a whole picture and reads them in reading order, with RapidOCR's two models.

Detection gives a slanted box a line; each box is straightened and read by itself, so that a reading depends neither on
other pictures nor on other lines. Running the detector and turning its map into boxes are RapidOCR's.
"""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.reward.scorers.ocr.onnx_models import rapidocr_config
from services.reward.scorers.ocr.recognition import WHOLE, LineReader, Reading, as_line

SIDE_STEP = 32
"""The detector halves its input five times."""

MAX_LINES = 64
"""Read of one picture, the first in reading order: a policy that scribbles everywhere must not cost minutes."""

Quads = NDArray[np.float32]
"""(N, 4, 2): corners of N boxes as x, y in pixels, clockwise from the top left of the text."""


class PageReader:
    """Detection on `num_threads` CPU threads in front of a line reader."""

    def __init__(self, lines: LineReader, num_threads: int) -> None:
        cv2.setNumThreads(num_threads)
        self._lines = lines
        self._detector = _rapidocr_detector(num_threads)

    def read(self, image: Image.Image, detection_size: int, min_width: int) -> list[Reading]:
        """A reading of each line found in an RGB picture, in reading order, of the first `MAX_LINES`.

        detection_size: pixels that the longer side is scaled to while lines are looked for. min_width: see `as_line`.
        """
        pixels = np.asarray(image)
        boxes = in_reading_order(self._find(image, detection_size))[:MAX_LINES]
        parts = [straightened(pixels, box) for box in boxes]
        return [self._lines.read_alone(as_line(Image.fromarray(part), WHOLE, min_width)) for part in parts]

    def _find(self, image: Image.Image, detection_size: int) -> Quads:
        probability = self._detector.session(as_detector_input(image, detection_size))
        boxes, _ = self._detector.postprocess_op(probability, (image.height, image.width))
        return np.asarray(boxes, dtype=np.float32).reshape(-1, 4, 2)


def as_detector_input(image: Image.Image, size: int) -> NDArray[np.float32]:
    """(1, 3, H, W) fp32, BGR, −1 … 1: the longer side `size` pixels and the other in proportion, both rounded to
    multiples of 32."""
    scale = size / max(image.size)
    width, height = (SIDE_STEP * max(1, round(side * scale / SIDE_STEP)) for side in image.size)
    scaled = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32)
    bgr = np.ascontiguousarray(scaled[:, :, ::-1].transpose(2, 0, 1))
    return (bgr / np.float32(127.5) - np.float32(1.0))[None]


def straightened(pixels: NDArray[np.uint8], box: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The part of a picture (H, W, 3) uint8 inside a box (4, 2), turned level; a tall part is turned to lie."""
    from rapidocr.utils.process_img import get_rotate_crop_image

    part: NDArray[np.uint8] = np.ascontiguousarray(get_rotate_crop_image(pixels, box))
    return part


def in_reading_order(boxes: Quads) -> Quads:
    """Rows from top to bottom, each from left to right. A box belongs to a row if its middle is at the height of the
    row's first box."""
    top, bottom = boxes[:, :, 1].min(1), boxes[:, :, 1].max(1)
    middle = (top + bottom) / 2
    rows: list[list[int]] = []
    for index in np.argsort(middle, kind="stable"):
        if rows and top[rows[-1][0]] < middle[index] < bottom[rows[-1][0]]:
            rows[-1].append(index)
        else:
            rows.append([index])
    left = boxes[:, :, 0].min(1)
    return boxes[[index for row in rows for index in sorted(row, key=lambda i: float(left[i]))]]


def joined(readings: Sequence[Reading], num_characters: int) -> Reading:
    """The lines as one, with spaces between. Its probabilities are those of the lines one after the other, parted by
    frames that are blank (the first of `num_characters` columns), so that no character runs on into the next line."""
    blank = np.zeros((1, num_characters), np.float32)
    blank[0, 0] = 1.0
    frames = [part for reading in readings for part in (reading.probabilities, blank)]
    lengths = [len(reading.text) for reading in readings]
    weighted = sum(reading.confidence * length for reading, length in zip(readings, lengths, strict=True))
    text = " ".join(reading.text for reading in readings)
    return Reading(text, weighted / sum(lengths) if any(lengths) else 0.0, np.concatenate([blank, *frames]))


def _rapidocr_detector(num_threads: int) -> Any:
    """Detector with the thresholds of RapidOCR's configuration."""
    from rapidocr.ch_ppocr_det import TextDetector

    settings = {"thresh": 0.3, "box_thresh": 0.5, "unclip_ratio": 1.6, "use_dilation": True, "score_mode": "fast"}
    return TextDetector(rapidocr_config("det", num_threads, settings))
