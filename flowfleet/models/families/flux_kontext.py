"""FLUX.1 Kontext, https://arxiv.org/abs/2506.15742, on the components of diffusers' `FluxKontextPipeline`.

It is FLUX.1 with at most one condition image, whose tokens follow the sample's own as those of a second picture.
"""

from typing import Any

import torch
from diffusers import FluxKontextPipeline
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from PIL import Image
from torch import Tensor

from flowfleet.models.conditions import ConditionedAdapter, conditions_of, too_narrow
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.flux import FluxAdapter, position_ids
from flowfleet.models.settings import Guidance, Size

MULTIPLE = 16
"""Pixels that a token is wide and high."""


class FluxKontextAdapter(FluxAdapter, ConditionedAdapter):
    """See `ModelAdapter`."""

    pipeline_class = FluxKontextPipeline
    max_images = 1

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        rows = self._rows_of_images(prompts, images)
        return self._with_conditions(super()._encode(prompts, None), rows)

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        """Blank prompts, each with one square image if the job sets the area of condition images."""
        blank = super().blank_prompts(count, num_tokens)
        return blank if self.condition_pixels is None else self._blank_conditions(blank, MULTIPLE)

    def _resize(self, picture: Image.Image) -> Image.Image:
        """To the size among the model's own whose aspect ratio is nearest; to the job's area, if it sets one."""
        ratio = picture.width / picture.height
        if self.condition_pixels is None:
            _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        else:
            width, height = ((self.condition_pixels * part) ** 0.5 for part in (ratio, 1 / ratio))
        width, height = (int(side + 0.5) // MULTIPLE * MULTIPLE for side in (width, height))
        if not (width and height):
            raise too_narrow(picture, self._pixels_wanted())
        resized: Image.Image = self.pipeline.image_processor.resize(picture, height, width)
        return resized

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        tokens, positions = [latents], [position_ids(*self._token_grid(size))]
        for condition in conditions_of(prompts, latents.device):
            tokens.append(condition.flatten(1, 2))
            rows, columns = condition.shape[1:3]
            positions.append(position_ids(rows, columns, picture=1))
        joined = torch.cat(tokens, dim=1), torch.cat(positions)
        return self._transform(expert, *joined, timesteps, prompts, guidance)[:, : latents.shape[1]]
