"""How good a tiny video model is: films of fixed prompts from fixed noise, judged as the recipe's job judges them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowfleet.job.spec import read_job_file
from flowfleet.media.files import Frames
from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.tiny_video.clips import EDGE, NUM_FRAMES
from services.reward.scorer import Sample, Score
from services.reward.scorers.motion import MotionScorer

JOB_FILE = Path(__file__).parents[1] / "tiny_video.toml"
NUM_STEPS = 6
NOISE_SEEDS = (7, 11, 12, 13)
LATENT_SHAPE = (16, 3, 4, 4)
BATCH_SIZE = 96


@dataclass(frozen=True)
class Obedience:
    """Means over films. `motion`: score; `obeyed`: share that scores more than a half; `presence`: how far the subject
    is there; the other two, of each film's middle frame, guard against hacks."""

    motion: float
    obeyed: float
    presence: float
    edge_density: float
    colour_entropy: float


def fixed_noise(num_films: int, seed: int) -> torch.Tensor:
    """Starting latents (num_films, 16, 3, 4, 4) fp32, the same everywhere; a longer set begins with a shorter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(LATENT_SHAPE, generator=generator) for _ in range(num_films)])


def film(pipeline: Any, prompts: Sequence[str], noise_seed: int = NOISE_SEEDS[0], num_steps: int = NUM_STEPS) -> Frames:
    """Films (N, 9, 32, 32, 3) uint8 by a `WanPipeline` in deterministic steps from `fixed_noise`."""
    noise = fixed_noise(len(prompts), noise_seed).to(pipeline.device)
    parts = [
        pipeline(
            prompt=list(prompts[start : start + BATCH_SIZE]),
            latents=noise[start : start + BATCH_SIZE],
            height=EDGE,
            width=EDGE,
            num_frames=NUM_FRAMES,
            num_inference_steps=num_steps,
            guidance_scale=1.0,
            output_type="np",
        ).frames
        for start in range(0, len(prompts), BATCH_SIZE)
    ]
    films: Frames = (np.concatenate(parts) * 255).round().astype(np.uint8)
    return films


def judge(films: Frames, prompts: Sequence[str]) -> Obedience:
    """Score `films`, (N, F, H, W, 3) uint8, with the recipe's reward."""
    scorer = MotionScorer()
    params = scorer.parse(read_job_file(JOB_FILE)["rewards"]["motion"]["params"])
    samples = [Sample(frames, prompt) for frames, prompt in zip(films, prompts, strict=True)]
    scores = [outcome for outcome in scorer.score(samples, params) if isinstance(outcome, Score)]
    assert len(scores) == len(prompts), "every prompt names a direction"
    middle = films[:, films.shape[1] // 2]
    return Obedience(
        motion=float(np.mean([score.value for score in scores])),
        obeyed=float(np.mean([score.value > 0.5 for score in scores])),
        presence=float(np.mean([score.components["presence"] for score in scores])),
        edge_density=float(np.mean([edge_density(picture) for picture in middle])),
        colour_entropy=float(np.mean([colour_entropy(picture) for picture in middle])),
    )


def mean_over(results: Sequence[Obedience]) -> Obedience:
    """Each figure's mean over `results`, of equally many films each."""
    return Obedience(*np.mean([dataclasses.astuple(result) for result in results], axis=0).tolist())


def contact_sheet(films: Frames, scale: int = 2) -> Image.Image:
    """A film a row, a frame a column, enlarged by `scale`."""
    num, frames, height, width, _ = films.shape
    sheet = films.transpose(0, 2, 1, 3, 4).reshape(num * height, frames * width, 3)
    return Image.fromarray(np.ascontiguousarray(sheet)).resize((scale * frames * width, scale * num * height))
