"""How good a tiny model is: pictures of fixed prompts from fixed noise, read back and described in four numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from recipes.tiny.reading import SignReader, colour_entropy, edge_density
from recipes.tiny.signs import IMAGE_SIZE, Pixels, word_in

NUM_STEPS = 6
NOISE_SEED = 7
BATCH_SIZE = 128


@dataclass(frozen=True)
class Legibility:
    """`ocr`: mean score; `exact`: share read without error; edge density and colour entropy guard against hacks."""

    ocr: float
    exact: float
    edge_density: float
    colour_entropy: float


def fixed_noise(num_images: int) -> torch.Tensor:
    """Packed starting latents (num_images, 16, 64) fp32, the same on every machine; a longer set begins with a shorter."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.stack([torch.randn(16, 64, generator=generator) for _ in range(num_images)])


def paint(pipeline: QwenImagePipeline, prompts: Sequence[str]) -> Pixels:
    """Pictures (N, 64, 64, 3) uint8 in six deterministic steps from `fixed_noise`, without guidance."""
    noise = fixed_noise(len(prompts)).to(pipeline.device)
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
    return (np.concatenate(parts) * 255).round().astype(np.uint8)


def judge(reader: SignReader, images: Pixels, prompts: Sequence[str]) -> Legibility:
    """Read `images` and compare with the words that `prompts` ask for."""
    scores = reader.scores(images, [word_in(prompt) for prompt in prompts])
    return Legibility(
        ocr=float(scores.mean()),
        exact=float((scores == 1.0).mean()),
        edge_density=edge_density(images),
        colour_entropy=colour_entropy(images),
    )


def contact_sheet(images: Pixels, num_columns: int = 8) -> Image.Image:
    """The pictures side by side, row by row."""
    num_rows = -(-len(images) // num_columns)
    sheet = Image.new("RGB", (num_columns * IMAGE_SIZE, num_rows * IMAGE_SIZE))
    for index, image in enumerate(images):
        row, column = divmod(index, num_columns)
        sheet.paste(Image.fromarray(image), (column * IMAGE_SIZE, row * IMAGE_SIZE))
    return sheet
