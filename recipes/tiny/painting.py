"""Pictures of fixed prompts from fixed noise, by any small model that `QwenImagePipeline` runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from recipes.tiny.signs import IMAGE_SIZE, Pixels

NUM_STEPS = 6
NOISE_SEEDS = (7, 11, 12, 13)
BATCH_SIZE = 128
NUM_COLUMNS = 8
TOKEN_EDGE = 16
"""Pixels that a token of packed latents is wide and high."""


def fixed_noise(num_images: int, seed: int, image_size: int = IMAGE_SIZE) -> torch.Tensor:
    """Packed starting latents (num_images, tokens, 64) fp32, equal everywhere; a longer set begins with a shorter."""
    generator = torch.Generator().manual_seed(seed)
    shape = (image_size // TOKEN_EDGE) ** 2, 64
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(num_images)])


def paint(
    pipeline: Any,
    prompts: Sequence[str],
    noise_seed: int = NOISE_SEEDS[0],
    *,
    image_size: int = IMAGE_SIZE,
    num_steps: int = NUM_STEPS,
    guidance_scale: float = 1.0,
) -> Pixels:
    """Pictures (N, S, S, 3) uint8 by a `QwenImagePipeline`, in deterministic steps from `fixed_noise`.

    Where `guidance_scale` is above 1, it guides away from a negative prompt of one space, as jobs do by default.
    """
    noise = fixed_noise(len(prompts), noise_seed, image_size).to(pipeline.device)
    parts = [
        pipeline(
            prompt=list(prompts[start : start + BATCH_SIZE]),
            negative_prompt=[" "] * len(prompts[start : start + BATCH_SIZE]) if guidance_scale > 1 else None,
            latents=noise[start : start + BATCH_SIZE],
            height=image_size,
            width=image_size,
            num_inference_steps=num_steps,
            true_cfg_scale=guidance_scale,
            output_type="np",
        ).images
        for start in range(0, len(prompts), BATCH_SIZE)
    ]
    pixels: Pixels = (np.concatenate(parts) * 255).round().astype(np.uint8)
    return pixels


def contact_sheet(images: Pixels, scale: int = 2, num_columns: int = NUM_COLUMNS) -> Image.Image:
    """The pictures side by side, `num_columns` a row, enlarged by `scale`."""
    height, width = images.shape[1:3]
    num_rows = -(-len(images) // num_columns)
    sheet = Image.new("RGB", (num_columns * width, num_rows * height))
    for index, image in enumerate(images):
        row, column = divmod(index, num_columns)
        sheet.paste(Image.fromarray(image), (column * width, row * height))
    return sheet.resize((scale * sheet.width, scale * sheet.height))
