"""Chroma1 on the components of diffusers' `ChromaPipeline`.

It is FLUX.1 without CLIP and without embedded guidance. A prompt is 512 tokens of T5; the mask of those that the
transformer attends to, the prompt's and one of padding, travels as the extra `attention`. That is no mask in the sense
of `PromptEmbeds`: the pipeline adds it to the attention scores of the whole sequence, so that padding has an effect.
"""

from dataclasses import replace
from typing import Any

import torch
from diffusers import ChromaPipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.flux import FluxAdapter, position_ids
from flowfleet.models.loading import USUAL_PARTS
from flowfleet.models.settings import Guidance, Size


class ChromaAdapter(FluxAdapter):
    """See `ModelAdapter`."""

    pipeline_class = ChromaPipeline
    parts = USUAL_PARTS

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, _, attention, *_ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        return PromptEmbeds.whole(embeds, {"attention": attention})

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        blank = ModelAdapter.blank_prompts(self, count, self.max_sequence_length)
        return replace(blank, extras={"attention": blank.embeds.new_zeros(count, self.max_sequence_length)})

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        assert not prompts.has_padding, "all prompts have one width"
        if guidance.embedded is not None:
            raise ValueError("Chroma takes no embedded guidance: leave rollout.embedded_guidance out")
        text = prompts.extras["attention"].to(latents.device, self.dtype)
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            txt_ids=latents.new_zeros(prompts.embeds.shape[1], 3),
            img_ids=position_ids(*self._token_grid(size)).to(latents.device),
            attention_mask=torch.cat([text, text.new_ones(latents.shape[:2])], dim=1),
            return_dict=False,
        )[0]
        return output.float()
