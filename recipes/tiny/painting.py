"""Pictures of fixed prompts from fixed noise, by the tiny sign painter."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from recipes.tiny.making import NOISE_SEEDS, sample
from recipes.tiny.signs import IMAGE_SIZE, Pixels

NUM_COLUMNS = 8
LATENTS = ((IMAGE_SIZE // 16) ** 2, 64)
"""Shape of a picture's packed latents: a token is 16 pixels wide and high."""


def paint(pipeline: Any, prompts: Sequence[str], noise_seed: int = NOISE_SEEDS[0]) -> Pixels:
    """Pictures (N, 64, 64, 3) uint8 by a `QwenImagePipeline`."""
    return sample(pipeline, prompts, LATENTS, noise_seed, height=IMAGE_SIZE, width=IMAGE_SIZE, true_cfg_scale=1.0)


def contact_sheet(images: Pixels, scale: int = 2) -> Image.Image:
    """The pictures side by side, `NUM_COLUMNS` a row, enlarged by `scale`."""
    height, width = images.shape[1:3]
    num_rows = -(-len(images) // NUM_COLUMNS)
    sheet = Image.new("RGB", (NUM_COLUMNS * width, num_rows * height))
    for index, image in enumerate(images):
        row, column = divmod(index, NUM_COLUMNS)
        sheet.paste(Image.fromarray(image), (column * width, row * height))
    return sheet.resize((scale * sheet.width, scale * sheet.height))
