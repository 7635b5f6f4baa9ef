"""How good a tiny model is: pictures of fixed prompts from fixed noise, judged as the demo's job judges them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowfleet.job.spec import read_job_file
from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.tiny.signs import IMAGE_SIZE, Pixels
from services.reward.scorer import Sample, Score
from services.reward.scorers.reading.ocr import OcrScorer

JOB_FILE = Path(__file__).parents[1] / "tiny_ocr.toml"
NUM_STEPS = 6
NOISE_SEEDS = (7, 11, 12, 13)
BATCH_SIZE = 128
NUM_COLUMNS = 8


@dataclass(frozen=True)
class Legibility:
    """Means over pictures. `ocr`: score; `exact`: share read without error; the other two guard against hacks."""

    ocr: float
    exact: float
    edge_density: float
    colour_entropy: float


def fixed_noise(num_images: int, seed: int) -> torch.Tensor:
    """Packed starting latents (num_images, 16, 64) fp32, the same everywhere; a longer set begins with a shorter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(16, 64, generator=generator) for _ in range(num_images)])


def paint(pipeline: Any, prompts: Sequence[str], noise_seed: int = NOISE_SEEDS[0]) -> Pixels:
    """Pictures (N, 64, 64, 3) uint8 by a `QwenImagePipeline` in six deterministic steps from `fixed_noise`."""
    noise = fixed_noise(len(prompts), noise_seed).to(pipeline.device)
    parts = [
        pipeline(
            prompt=list(prompts[start : start + BATCH_SIZE]),
            latents=noise[start : start + BATCH_SIZE],
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_inference_steps=NUM_STEPS,
            true_cfg_scale=1.0,
            output_type="np",
        ).images
        for start in range(0, len(prompts), BATCH_SIZE)
    ]
    pixels: Pixels = (np.concatenate(parts) * 255).round().astype(np.uint8)
    return pixels


def mean_over(results: Sequence[Legibility]) -> Legibility:
    """Each figure's mean over `results`, of equally many pictures each."""
    return Legibility(*np.mean([dataclasses.astuple(result) for result in results], axis=0).tolist())


class Judge:
    """The OCR reward with the demo's parameters, and the image statistics that must not move."""

    def __init__(self, num_threads: int = 2) -> None:
        self._scorer = OcrScorer(num_threads)
        self._params = self._scorer.parse(read_job_file(JOB_FILE)["rewards"]["ocr"]["params"])

    def judge(self, images: Pixels, prompts: Sequence[str]) -> Legibility:
        """Read `images`, (N, 64, 64, 3) uint8, and compare with the words that `prompts` ask for."""
        pairs = zip(images, prompts, strict=True)
        outcomes = self._scorer.score([Sample(image[None], prompt) for image, prompt in pairs], self._params)
        scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
        assert len(scores) == len(prompts), "every prompt names a word"
        return Legibility(
            ocr=float(np.mean([score.value for score in scores])),
            exact=float(np.mean([score.components["exact"] for score in scores])),
            edge_density=float(np.mean([edge_density(image) for image in images])),
            colour_entropy=float(np.mean([colour_entropy(image) for image in images])),
        )


def contact_sheet(images: Pixels, scale: int = 2) -> Image.Image:
    """The pictures side by side, `NUM_COLUMNS` a row, enlarged by `scale`."""
    num_rows = -(-len(images) // NUM_COLUMNS)
    sheet = Image.new("RGB", (NUM_COLUMNS * IMAGE_SIZE, num_rows * IMAGE_SIZE))
    for index, image in enumerate(images):
        row, column = divmod(index, NUM_COLUMNS)
        sheet.paste(Image.fromarray(image), (column * IMAGE_SIZE, row * IMAGE_SIZE))
    return sheet.resize((scale * sheet.width, scale * sheet.height))
