"""Qwen-Image-Edit with one to three condition images a prompt, on the components of `QwenImageEditPlusPipeline`.

The images reach the transformer twice: seen by Qwen2.5-VL as part of the prompt, and as latents whose tokens follow the
sample's own (models/conditions.py). Each image keeps its aspect ratio and is brought to a fixed area, whatever the size
of the sample.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as diffusers_edit
from PIL import Image
from torch import Tensor

from flowfleet.models.conditions import ConditionedAdapter, conditions_of, too_narrow
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.loading import USUAL_PARTS, Parts
from flowfleet.models.picture_prompts import PictureProcessor, tell_pictures_from_text
from flowfleet.models.settings import Guidance, Size

RESIZE_MULTIPLE = 32
"""Pixels that the sides of resized images are multiples of."""
LEAST_PIXELS_SEEN = 32 * 32
"""Minimum pixels of an image that Qwen2.5-VL sees; one of its tokens takes 28 x 28."""


class QwenImageEditAdapter(QwenImageAdapter, ConditionedAdapter):
    """See `ModelAdapter`. Negative prompts are encoded with the images of their rows, as the pipeline does.

    `condition_pixels` is the area of the images as latents; what Qwen2.5-VL sees is scaled alike.
    """

    pipeline_class = QwenImageEditPlusPipeline
    parts: ClassVar[Parts] = {**USUAL_PARTS, "text_encoder": ("text_encoder", "tokenizer", "processor")}
    own_parts = ("processor",)

    min_images = 1
    max_images = 3

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Self:
        adapter = super().load(path, **options)
        if adapter.text_encoder is not None:
            adapter.pipeline.processor = PictureProcessor.load(path, adapter.pipeline.tokenizer)
            tell_pictures_from_text(adapter.text_encoder)
        return adapter

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        rows = self._rows_of_images(prompts, images)
        return concat_embeds([self._encode_row(*row) for row in zip(prompts, rows, strict=True)])

    def _encode_row(self, prompt: str, pictures: Sequence[Image.Image]) -> PromptEmbeds:
        seen = [self._fit(picture, self._pixels_seen()) for picture in pictures]
        embeds, _ = self.pipeline.encode_prompt([prompt], image=seen, device=self.device)
        return self._with_conditions(PromptEmbeds.whole(embeds), [pictures])

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        """Blank prompts, each with one square condition image."""
        return self._blank_conditions(super().blank_prompts(count, num_tokens), RESIZE_MULTIPLE)

    def _usual_pixels(self) -> int:
        return int(diffusers_edit.VAE_IMAGE_SIZE)

    def _pixels_seen(self) -> float:
        """Area of what Qwen2.5-VL sees."""
        usual, encoded = float(diffusers_edit.CONDITION_IMAGE_SIZE), float(self._usual_pixels())
        if self.condition_pixels is None:
            return usual
        return max(LEAST_PIXELS_SEEN, self.condition_pixels * usual / encoded)

    def _resize(self, picture: Image.Image) -> Image.Image:
        return self._fit(picture, self._pixels_wanted())

    def _fit(self, picture: Image.Image, pixels: float) -> Image.Image:
        """To about that area at the same aspect ratio, in multiples of 32 pixels."""
        fit: Callable[[float, float], tuple[int, int]] = diffusers_edit.calculate_dimensions
        width, height = fit(pixels, picture.width / picture.height)
        if not (width and height):
            raise too_narrow(picture, pixels)
        resized: Image.Image = self.pipeline.image_processor.resize(picture, height, width)
        return resized

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        conditions = conditions_of(prompts, latents.device)
        if not conditions:
            raise ValueError("these prompts have no condition images: encode them with `images`")
        tokens = torch.cat([latents, *(condition.flatten(1, 2) for condition in conditions)], dim=1)
        grids = [self._token_grid(size), *((condition.shape[1], condition.shape[2]) for condition in conditions)]
        return self._transform(expert, tokens, timesteps, prompts, grids)[:, : latents.shape[1]]
