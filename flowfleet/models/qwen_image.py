"""Qwen-Image, https://arxiv.org/abs/2508.02324, on the components of diffusers' `QwenImagePipeline`.

Latents travel packed, as the transformer takes them: (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch import Tensor

from flowfleet.models.base import (
    ALL_COMPONENTS,
    Component,
    ModelAdapter,
    PromptEmbeds,
    Schedule,
    pad_embeds,
    seeded_noise,
)
from flowfleet.models.loading import component_config, load_pipeline
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.single_frame import SingleFrameDecoder

PATCH = 2
"""Latent pixels that a token is wide and high."""
DECODE_CHUNK_PIXELS = 1024 * 1024
"""Pixels decoded at once: bounds the memory of activations."""


class QwenImageAdapter(ModelAdapter):
    """See `ModelAdapter`. What it must know of components that were not loaded is read from their configuration."""

    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    def __init__(self, pipeline: Any, *, vae_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Takes a `QwenImagePipeline`, some of whose components may be None; use `load`."""
        self.dtype = dtype
        self.device = device
        self.transformer = pipeline.transformer
        self.text_encoder = pipeline.text_encoder
        self.vae = pipeline.vae
        self._pipeline = pipeline
        self._vae_scale = 2 ** len(vae_config["temperal_downsample"])
        self._latent_channels = int(vae_config["z_dim"])
        self._latents_mean = torch.tensor(vae_config["latents_mean"]).reshape(1, -1, 1, 1)
        self._latents_std = torch.tensor(vae_config["latents_std"]).reshape(1, -1, 1, 1)
        self._decoder = None if self.vae is None else SingleFrameDecoder(self.vae)
        self._schedules: dict[tuple[int, int], Schedule] = {}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        components: tuple[Component, ...] = ALL_COMPONENTS,
    ) -> Self:
        vae_config = component_config(AutoencoderKLQwenImage, path, "vae")
        pipeline = load_pipeline(QwenImagePipeline, path, dtype=dtype, device=device, components=components)
        return cls(pipeline, vae_config=vae_config, dtype=dtype, device=torch.device(device))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, pad_to: int | None = None) -> PromptEmbeds:
        if self.text_encoder is None:
            raise ValueError("encode needs the text encoder: load the adapter with the component text_encoder")
        if not prompts:
            raise ValueError("encode needs at least one prompt")
        embeds, mask = self._pipeline.encode_prompt(list(prompts), device=self.device)
        if mask is None:  # diffusers' way to say that nothing is padded
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        encoded = PromptEmbeds(embeds, mask.bool())
        return encoded if pad_to is None else pad_embeds(encoded, pad_to)

    def schedule(self, num_steps: int, height: int, width: int) -> Schedule:
        rows, columns = self._token_grid(height, width)
        key = num_steps, rows * columns
        if key not in self._schedules:
            self._schedules[key] = flow_match_schedule(self._pipeline.scheduler.config, *key)
        return self._schedules[key]

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self._token_grid(height, width)
        return rows * columns, self._latent_channels * PATCH**2

    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> Tensor:
        rows, columns = self._token_grid(height, width)
        return pack(seeded_noise(seeds, (self._latent_channels, rows * PATCH, columns * PATCH)))

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timestep: Tensor,
        prompts: PromptEmbeds,
        *,
        height: int,
        width: int,
        negative: PromptEmbeds | None = None,
        guidance_scale: float = 1.0,
    ) -> Tensor:
        def predict(text: PromptEmbeds) -> Tensor:
            output: Tensor = transformer(
                hidden_states=latents.to(self.dtype),
                timestep=timestep.to(latents.device, torch.float32).expand(len(latents)) / 1000,
                encoder_hidden_states=text.embeds.to(latents.device, self.dtype),
                encoder_hidden_states_mask=text.mask.to(latents.device) if text.has_padding else None,
                img_shapes=[[(1, *self._token_grid(height, width))]] * len(latents),
                return_dict=False,
            )[0]
            return output.float()

        positive = predict(_rows_of(prompts, len(latents)))
        if guidance_scale <= 1:
            return positive
        if negative is None:
            raise ValueError(f"a guidance scale of {guidance_scale} needs negative prompt embeds")
        return guide(positive, predict(_rows_of(negative, len(latents))), guidance_scale)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        if self._decoder is None:
            raise ValueError("decode needs the VAE: load the adapter with the component vae")
        chunk = max(1, DECODE_CHUNK_PIXELS // (height * width))
        return torch.cat([self._decode(part, self._decoder, height, width) for part in torch.split(latents, chunk)])

    def _decode(self, latents: Tensor, decoder: SingleFrameDecoder, height: int, width: int) -> Tensor:
        planes = unpack(latents.to(self.device, torch.float32), *self._token_grid(height, width))
        planes = planes * self._latents_std.to(self.device) + self._latents_mean.to(self.device)
        pixels: Tensor = decoder(planes.to(self.vae.dtype)).float()
        return ((pixels + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        multiple = self._vae_scale * PATCH
        if height < multiple or width < multiple or height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, but are {height} and {width}")
        return height // multiple, width // multiple


def pack(planes: Tensor) -> Tensor:
    """(B, Z, 2r, 2c) latent planes to (B, rc, 4Z) tokens of 2x2 pixels."""
    batch, channels, height, width = planes.shape
    patches = planes.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """(B, rc, 4Z) tokens to (B, Z, 2r, 2c) latent planes; undoes `pack`."""
    patches = tokens.reshape(len(tokens), rows, columns, -1, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, rows * PATCH, columns * PATCH)


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance (B, T, C): n + scale (p - n), each token rescaled to the norm of p."""
    combined = negative + scale * (positive - negative)
    norm = combined.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(combined.dtype).tiny)
    rescaled: Tensor = combined * (positive.norm(dim=-1, keepdim=True) / norm)
    return rescaled


def _rows_of(prompts: PromptEmbeds, num_rows: int) -> PromptEmbeds:
    """One prompt for all rows, or one a row."""
    if len(prompts) == num_rows:
        return prompts
    if len(prompts) == 1:
        return prompts.repeat(num_rows)
    raise ValueError(f"need prompt embeds of 1 or {num_rows} rows, but got {len(prompts)}")
