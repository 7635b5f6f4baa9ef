"""Ovis-Image, https://arxiv.org/abs/2511.22982, on the components of diffusers' `OvisImagePipeline`.

It is FLUX.1 with Qwen3 in place of both text encoders and without embedded guidance. A prompt is 256 tokens; those of
padding are zero vectors, which the transformer attends to as to all others. Text tokens have positions of their own.
"""

from typing import Any

import torch
from diffusers import OvisImagePipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.flux import FluxAdapter, position_ids
from flowfleet.models.loading import USUAL_PARTS
from flowfleet.models.settings import Guidance, Size


class OvisImageAdapter(FluxAdapter):
    """See `ModelAdapter`."""

    pipeline_class = OvisImagePipeline
    parts = USUAL_PARTS
    max_sequence_length: int = 256
    """Tokens of Qwen3."""

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, *_ = self.pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
        )
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return PromptEmbeds(embeds, mask, has_padding=False)

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        assert not prompts.has_padding, "all prompts have one width"
        if guidance.embedded is not None:
            raise ValueError("Ovis-Image takes no embedded guidance: leave rollout.embedded_guidance out")
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            txt_ids=text_ids(prompts.embeds.shape[1]).to(latents.device),
            img_ids=position_ids(*self._token_grid(size)).to(latents.device),
            return_dict=False,
        )[0]
        return output.float()


def text_ids(num_tokens: int) -> Tensor:
    """(num_tokens, 3) float32: 0, the token's number and that again, for the rotary embedding."""
    numbers = torch.arange(num_tokens, dtype=torch.float32)
    return torch.stack([torch.zeros_like(numbers), numbers, numbers], dim=1)
