"""How good a tiny video model is: films of fixed prompts from fixed noise, judged as the recipe's job judges them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowfleet.job.spec import read_job_file
from flowfleet.media.files import Frames
from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.tiny.making import NOISE_SEEDS, sample
from recipes.tiny_video.clips import EDGE, NUM_FRAMES
from services.reward.scorer import Sample, Score
from services.reward.scorers.motion import MotionScorer

JOB_FILE = Path(__file__).parents[1] / "tiny_video.toml"
LATENT_SHAPE = (16, 3, 4, 4)


@dataclass(frozen=True)
class Obedience:
    """Means over films. `motion`: score; `obeyed`: share that scores more than a half; `presence`: how far the subject
    is there; the other two, of each film's middle frame, guard against hacks."""

    motion: float
    obeyed: float
    presence: float
    edge_density: float
    colour_entropy: float


def film(pipeline: Any, prompts: Sequence[str], noise_seed: int = NOISE_SEEDS[0]) -> Frames:
    """Films (N, 9, 32, 32, 3) uint8 by a `WanPipeline`, in deterministic steps from fixed noise."""
    size = {"height": EDGE, "width": EDGE, "num_frames": NUM_FRAMES}
    return sample(pipeline, prompts, LATENT_SHAPE, noise_seed, guidance_scale=1.0, **size)


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


def contact_sheet(films: Frames, scale: int = 2) -> Image.Image:
    """A film a row, a frame a column, enlarged by `scale`."""
    num, frames, height, width, _ = films.shape
    sheet = films.transpose(0, 2, 1, 3, 4).reshape(num * height, frames * width, 3)
    return Image.fromarray(np.ascontiguousarray(sheet)).resize((scale * frames * width, scale * num * height))
