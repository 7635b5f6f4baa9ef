"""Qwen-Image-Edit with one to three condition images a prompt, on the components of `QwenImageEditPlusPipeline`.

The images reach the transformer twice: seen by Qwen2.5-VL as part of the prompt, and as latents whose tokens follow the
sample's own. The latents of the i-th image travel as the extra `image_<i>`, (B, rows, columns, 4Z) float32: their shape
says the grid, so that prompts whose images have other grids cannot come into one batch, and no device is asked for it.
Each image keeps its aspect ratio and is brought to a fixed area, whatever the size of the sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as diffusers_edit
from PIL import Image
from torch import Tensor

from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.loading import USUAL_PARTS, Parts
from flowfleet.models.packing import PATCH
from flowfleet.models.picture_prompts import PictureProcessor, tell_pictures_from_text
from flowfleet.models.settings import Guidance, Size

MAX_IMAGES = 3
RESIZE_MULTIPLE = 32
"""Pixels that the sides of resized images are multiples of."""
LEAST_PIXELS_SEEN = 32 * 32
"""Minimum pixels of an image that Qwen2.5-VL sees; one of its tokens takes 28 x 28."""


class QwenImageEditAdapter(QwenImageAdapter):
    """See `ModelAdapter`. Negative prompts are encoded with the images of their rows, as the pipeline does."""

    pipeline_class = QwenImageEditPlusPipeline
    parts: ClassVar[Parts] = {**USUAL_PARTS, "text_encoder": ("text_encoder", "tokenizer", "processor")}
    own_parts = ("processor",)

    condition_pixels: int | None = None
    """Area of the images as latents; what Qwen2.5-VL sees is scaled alike. None is the pipeline's: 1024² and 384²."""

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Self:
        adapter = super().load(path, **options)
        if adapter.text_encoder is not None:
            adapter.pipeline.processor = PictureProcessor.load(path, adapter.pipeline.tokenizer)
            tell_pictures_from_text(adapter.text_encoder)
        return adapter

    def resize_conditions(self, pixels: int | None) -> None:
        self.condition_pixels = pixels

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        if self.vae is None:
            raise ValueError("encode needs the VAE for condition images: load the adapter with the component vae")
        if images is None or len(images) != len(prompts):
            given = "none" if images is None else str(len(images))
            raise ValueError(f"{len(prompts)} prompts need as many sequences of condition images, but got {given}")
        return concat_embeds([self._encode_row(*row) for row in zip(prompts, images, strict=True)])

    def _encode_row(self, prompt: str, images: Sequence[Image.Image]) -> PromptEmbeds:
        if not 1 <= len(images) <= MAX_IMAGES:
            raise ValueError(f"this model takes 1 to {MAX_IMAGES} condition images a prompt, but one has {len(images)}")
        pictures = [image.convert("RGB") for image in images]
        seen = [self._resize(picture, self._pixels_seen()) for picture in pictures]
        embeds, _ = self.pipeline.encode_prompt([prompt], image=seen, device=self.device)
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        latents = {f"image_{i}": self._condition_latents(picture) for i, picture in enumerate(pictures, start=1)}
        return PromptEmbeds(embeds, mask, latents, has_padding=False)

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        """Blank prompts, each with one square condition image."""
        blank = super().blank_prompts(count, num_tokens)
        side = (
            round((self.condition_pixels or diffusers_edit.VAE_IMAGE_SIZE) ** 0.5 / RESIZE_MULTIPLE) * RESIZE_MULTIPLE
        )
        grid = self._token_grid(Size(side, side))
        latents = torch.zeros(count, *grid, self._latent_channels * PATCH**2, device=self.device)
        return replace(blank, extras={"image_1": latents})

    def _condition_latents(self, picture: Image.Image) -> Tensor:
        """(1, rows, columns, 4Z) float32 on the adapter's device."""
        resized = self._resize(picture, self.condition_pixels or diffusers_edit.VAE_IMAGE_SIZE)
        size = Size(resized.height, resized.width)
        tokens = self._encode_media(torch.from_numpy(np.array(resized))[None, None], size)
        return tokens.reshape(1, *self._token_grid(size), -1).to(self.device)

    def _pixels_seen(self) -> float:
        """Area of what Qwen2.5-VL sees."""
        usual, encoded = float(diffusers_edit.CONDITION_IMAGE_SIZE), float(diffusers_edit.VAE_IMAGE_SIZE)
        if self.condition_pixels is None:
            return usual
        return max(LEAST_PIXELS_SEEN, self.condition_pixels * usual / encoded)

    def _resize(self, picture: Image.Image, pixels: float) -> Image.Image:
        """To about that area at the same aspect ratio, in multiples of 32 pixels."""
        fit: Callable[[float, float], tuple[int, int]] = diffusers_edit.calculate_dimensions
        width, height = fit(pixels, picture.width / picture.height)
        if not (width and height):
            raise ValueError(
                f"a condition image of {picture.width} x {picture.height} is too narrow for an area of {pixels:.0f} "
                "pixels: give a squarer one, or raise condition_pixels"
            )
        resized: Image.Image = self.pipeline.image_processor.resize(picture, height, width)
        return resized

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        conditions = [prompts.extras[name].to(latents.device) for name in sorted(prompts.extras)]
        if not conditions:
            raise ValueError("these prompts have no condition images: encode them with `images`")
        tokens = torch.cat([latents, *(condition.flatten(1, 2) for condition in conditions)], dim=1)
        grids = [self._token_grid(size), *((condition.shape[1], condition.shape[2]) for condition in conditions)]
        return self._transform(expert, tokens, timesteps, prompts, grids)[:, : latents.shape[1]]
