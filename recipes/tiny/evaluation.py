"""How good a tiny model is: its pictures judged as the demo's job judges them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowfleet.job.spec import read_job_file
from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.tiny.signs import Pixels
from services.reward.scorer import Outcome, Sample, Score
from services.reward.scorers.ocr import OcrScorer

JOB_FILE = Path(__file__).parents[1] / "tiny_ocr.toml"


@dataclass(frozen=True)
class Legibility:
    """Means over pictures. `ocr`: score; `exact`: share read without error; the other two guard against hacks."""

    ocr: float
    exact: float
    edge_density: float
    colour_entropy: float


class Judge:
    """The OCR reward with the demo's parameters, and the image statistics that must not move."""

    def __init__(self, num_threads: int = 2) -> None:
        self._scorer = OcrScorer(num_threads)
        self._params = self._scorer.parse(read_job_file(JOB_FILE)["rewards"]["ocr"]["params"])

    def outcomes(self, images: Pixels, prompts: Sequence[str]) -> list[Outcome]:
        """The reward's outcome for each picture."""
        pairs = zip(images, prompts, strict=True)
        return self._scorer.score([Sample(image[None], prompt) for image, prompt in pairs], self._params)

    def judge(self, images: Pixels, prompts: Sequence[str]) -> Legibility:
        """Read `images`, (N, 64, 64, 3) uint8, and compare with the words that `prompts` ask for."""
        scores = [outcome for outcome in self.outcomes(images, prompts) if isinstance(outcome, Score)]
        assert len(scores) == len(prompts), "every prompt names a word"
        return Legibility(
            ocr=float(np.mean([score.value for score in scores])),
            exact=float(np.mean([score.components["exact"] for score in scores])),
            edge_density=float(np.mean([edge_density(image) for image in images])),
            colour_entropy=float(np.mean([colour_entropy(image) for image in images])),
        )
