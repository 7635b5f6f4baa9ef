"""Wan 2.1 and 2.2, https://arxiv.org/abs/2503.20314, on the components of diffusers' `WanPipeline`: text to video.

One adapter serves three kinds of checkpoint, told apart by what they hold:

- one transformer (Wan2.1, every size);
- two experts (Wan2.2 A14B): `transformer` where sigma reaches the pipeline's `boundary_ratio`, else `transformer_2`;
- a timestep a token (Wan2.2 TI2V 5B, the pipeline's `expand_timesteps`), whose VAE has 48 channels at 1/16 size. With
  `Size.clean_frames` its videos begin with the prompt's image, whose latent frame is at timestep 0.

Latents are (B, Z, f, h, w): f = (num_frames - 1) / 4 + 1 latent frames of height / 8 by width / 8, with the 5B model's
VAE height / 16 by width / 16. The transformer sees prompts as 512 tokens of which the last are zero vectors, without a
mask; `encode` gives them no longer than they are, and the zeros are put back before each forward.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.pipelines.wan import pipeline_wan
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter, Schedule, without_images
from flowfleet.models.embeds import PromptEmbeds, pad_embeds
from flowfleet.models.loading import Component
from flowfleet.models.schedules import euler_schedule
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.video_vae import VideoAdapter

PATCH = 2
"""Latent pixels that a token is wide and high; it is one latent frame deep."""


class WanAdapter(VideoAdapter):
    """See `ModelAdapter`."""

    pipeline_class = WanPipeline
    vae_class = AutoencoderKLWan
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    parts: ClassVar[Mapping[Component, tuple[str, ...]]] = {
        **ModelAdapter.parts,
        "transformer": ("transformer", "transformer_2"),
    }
    text_width = "text_dim"
    patch = PATCH
    vae_dtype = torch.float32
    """Data type in which diffusers' examples load the VAE, whatever the rest uses."""
    max_sequence_length: int = 512
    """Tokens of UMT5 that the transformer sees of every prompt; longer prompts are cut, as by the pipeline."""

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self.boundary = pipeline.config.boundary_ratio
        self._timestep_per_token = bool(pipeline.config.expand_timesteps)
        self.clean_frames = int(self._timestep_per_token)
        self._spatial_scale = int(vae_config["scale_factor_spatial"])
        self._temporal_scale = int(vae_config["scale_factor_temporal"])
        self._latent_channels = int(vae_config["z_dim"])
        self._latents_mean = torch.tensor(vae_config["latents_mean"]).reshape(1, -1, 1, 1, 1)
        self._latents_std = torch.tensor(vae_config["latents_std"]).reshape(1, -1, 1, 1, 1)
        self._schedules: dict[tuple[int, float | None], Schedule] = {}

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        if not self.clean_frames:
            without_images(images)
        return self._with_images(self._encode_text(prompts), images)

    def _encode_text(self, prompts: list[str]) -> PromptEmbeds:
        clean: Any = pipeline_wan.prompt_clean
        cleaned = [clean(prompt) for prompt in prompts]
        tokens = self.pipeline.tokenizer(cleaned, truncation=True, max_length=self.max_sequence_length).input_ids
        lengths = torch.tensor([len(row) for row in tokens])
        width = int(lengths.max())
        embeds, _ = self.pipeline.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length, device=self.device
        )
        mask = torch.arange(width) < lengths[:, None]
        return PromptEmbeds(embeds[:, :width].contiguous(), mask.to(self.device))

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        return super().blank_prompts(count, min(num_tokens, self.max_sequence_length))

    def shared_tokens(self, size: Size) -> tuple[int, ...]:
        return (prod(self.latent_shape(size.whole)[1:]) // PATCH**2,)

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """The same for every size; see `euler_schedule`."""
        key = num_steps, shift
        if key not in self._schedules:
            self._schedules[key] = euler_schedule(self.pipeline.scheduler.config, num_steps, shift)
        return self._schedules[key]

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        given = size.clean_frames
        if given:
            latents = self._joined(latents, prompts)
        if self._timestep_per_token:
            frames, height, width = latents.shape[2:]
            of_frames = torch.nn.functional.pad(timesteps[:, None].expand(-1, frames - given), (given, 0))
            timesteps = of_frames.repeat_interleave((height // PATCH) * (width // PATCH), dim=1)
        return self._transform(expert, latents, timesteps, prompts)[:, :, given:]

    def _transform(self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds) -> Tensor:
        """The transformer's output (B, Z, f, h, w) float32; timesteps (B,) or (B, tokens)."""
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=pad_embeds(prompts, self.max_sequence_length).embeds.to(latents.device, self.dtype),
            return_dict=False,
        )[0]
        return output.float()
