"""Sana, https://arxiv.org/abs/2410.10629, on the components of diffusers' `SanaPipeline`.

Latents are spatial, (B, Z, H/32, W/32), of a deep-compression autoencoder. A prompt is up to 300 tokens of Gemma 2,
which reads the pipeline's instruction to rewrite prompts before it; negative prompts come without that instruction.
Samples follow Euler steps at the noise levels of the checkpoint's DPM-Solver, whose updates have no density.
"""

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderDC, SanaPipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import Schedule, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.packing import token_grid
from flowfleet.models.schedules import euler_schedule
from flowfleet.models.settings import Guidance, Size

INSTRUCTION: list[str] = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
"""Lines that the pipeline puts before a prompt."""


class SanaAdapter(PictureAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = SanaPipeline
    vae_class: ClassVar[Any] = AutoencoderDC
    text_width = "caption_channels"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    max_sequence_length: int = 300
    """Tokens of Gemma that the transformer sees; shorter prompts keep their own length."""

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        return self._embed(prompts, INSTRUCTION)

    @torch.no_grad()
    def encode_negative(
        self, prompts: Sequence[str], *, images: Sequence[Sequence[Image.Image]] | None = None
    ) -> PromptEmbeds:
        without_images(images)
        return self._embed(list(prompts), [])

    def _embed(self, prompts: list[str], instruction: list[str]) -> PromptEmbeds:
        embeds, mask, *_ = self.pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=instruction,
        )
        return PromptEmbeds(embeds * mask[..., None].to(embeds.dtype), mask.bool()).trimmed()

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        return super().blank_prompts(count, min(num_tokens, self.max_sequence_length))

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """The same for every size; see `euler_schedule`."""
        return euler_schedule(self.pipeline.scheduler.config, num_steps, shift)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        multiple = self._vae.scale
        rows, columns = token_grid(size, multiple=multiple)
        return self._vae.channels, rows, columns

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        output: Tensor = expert(
            latents.to(self.dtype),
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            encoder_attention_mask=prompts.mask.to(latents.device) if prompts.has_padding else None,
            timestep=timesteps * self.transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]].float()  # a model that learned its variance gives that as well
