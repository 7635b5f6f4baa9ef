"""Reading signs: how legible pictures are, and whether they still look like signs.

`SignReader` runs the recognition model that the `rapidocr` wheel carries on the part of the picture inside the frame
and scores the text as the `ocr` reward does: 1 minus the edit distance over the length of the word asked for.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from recipes.tiny.signs import Pixels

INNER_BOX = (3, 8, 61, 56)
"""Left, top, right, bottom of the part inside the frame, in pixels of a 64×64 sign."""

READER_SIZE = (160, 48)
"""Width and height that the recognition model is fed."""

BATCH_SIZE = 64


def bundled_recognizer() -> Path:
    """The recognition model inside the installed `rapidocr` package; ValueError where it is not installed."""
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None:
        raise ValueError("no text recognition model: install rapidocr, or name a model file with --recognizer")
    return Path(spec.origin).parent / "models" / "PP-OCRv6_rec_small.onnx"


def edit_distance(first: str, second: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def score_text(text: str, word: str) -> float:
    """1 where `word` stands in `text`, else 1 − min(distance, len(word)) / len(word); case and white space are ignored."""
    found, wanted = "".join(text.split()).lower(), "".join(word.split()).lower()
    if wanted in found:
        return 1.0
    return 1.0 - min(edit_distance(found, wanted), len(wanted)) / len(wanted)


class SignReader:
    """Recognises the text of signs with an ONNX model of the PP-OCR family (CTC, blank first, its alphabet inside)."""

    def __init__(self, recognizer: Path, num_threads: int = 2) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = num_threads
        self._session = onnxruntime.InferenceSession(str(recognizer), options, providers=["CPUExecutionProvider"])
        self._input_name = self._session.get_inputs()[0].name
        self._alphabet = self._session.get_modelmeta().custom_metadata_map["character"].splitlines() + [" "]

    def read(self, images: Pixels) -> list[str]:
        """The text on each of `images`, (N, 64, 64, 3) uint8."""
        return [self._collapse(path) for path in self._probabilities(images).argmax(-1)]

    def scores(self, images: Pixels, words: Sequence[str]) -> NDArray[np.float64]:
        """`score_text` of each image against its word: (N,)."""
        return np.array([score_text(text, word) for text, word in zip(self.read(images), words, strict=True)])

    def _probabilities(self, images: Pixels) -> NDArray[np.float32]:
        inputs = np.stack([_reader_input(image) for image in images])
        batches = (inputs[start : start + BATCH_SIZE] for start in range(0, len(inputs), BATCH_SIZE))
        return np.concatenate([self._session.run(None, {self._input_name: batch})[0] for batch in batches])

    def _collapse(self, path: NDArray[np.int64]) -> str:
        previous = np.concatenate(([0], path[:-1]))
        return "".join(self._alphabet[index - 1] for index in path[(path != previous) & (path != 0)])


def _reader_input(image: Pixels) -> NDArray[np.float32]:
    """(64, 64, 3) uint8 RGB to (3, 48, 160) float32 BGR in −1 … 1."""
    inner = Image.fromarray(image).crop(INNER_BOX).resize(READER_SIZE, Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(inner, dtype=np.float32)[:, :, ::-1].transpose(2, 0, 1) / 127.5 - 1.0)


def edge_density(images: Pixels) -> float:
    """Mean absolute difference of neighbouring grey values, rows plus columns, over (N, H, W, 3) images; 0 … 510."""
    grey = images.astype(np.float32).mean(-1)
    return float(np.abs(np.diff(grey, axis=1)).mean() + np.abs(np.diff(grey, axis=2)).mean())


def colour_entropy(images: Pixels) -> float:
    """Mean entropy in bits of each image's colour histogram with 8 bins a channel; 0 … 9."""
    return float(np.mean([_histogram_entropy(image) for image in images]))


def _histogram_entropy(image: Pixels) -> float:
    bins = (image >> 5).reshape(-1, 3).astype(np.int64) @ np.array([64, 8, 1])
    share = np.bincount(bins) / len(bins)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())
