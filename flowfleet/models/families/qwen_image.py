"""Qwen-Image, https://arxiv.org/abs/2508.02324, on the components of diffusers' `QwenImagePipeline`.

Latents travel packed, as the transformer takes them: (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter, Schedule, seeded_noise, to_pixels, to_uint8, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.qwen_image_attention import use_joint_attention
from flowfleet.models.families.qwen_image_block import use_fused_blocks
from flowfleet.models.level_tables import LevelLayers, LevelTable, table_of
from flowfleet.models.packing import PATCH, pack, token_grid, unpack
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.single_frame import SingleFrameDecoder

DECODE_CHUNK_PIXELS = 1024 * 1024
"""Pixels decoded at once: bounds the memory of activations."""


class QwenImageAdapter(ModelAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = QwenImagePipeline
    vae_class = AutoencoderKLQwenImage
    cuts_padding = True
    level_layers: ClassVar[LevelLayers | None] = LevelLayers(
        "time_text_embed", re.compile(r"transformer_blocks\.\d+\.(img|txt)_mod\.1|norm_out\.linear")
    )
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._vae_scale = 2 ** len(vae_config["temperal_downsample"])
        self._latent_channels = int(vae_config["z_dim"])
        self._latents_mean = torch.tensor(vae_config["latents_mean"]).reshape(1, -1, 1, 1)
        self._latents_std = torch.tensor(vae_config["latents_std"]).reshape(1, -1, 1, 1)
        self._decoder = None if self.vae is None else SingleFrameDecoder(self.vae)
        for expert in self.experts.values():
            use_joint_attention(expert)
            use_fused_blocks(expert)
        self._schedules: dict[tuple[int, int, float | None], Schedule] = {}

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, mask = self.pipeline.encode_prompt(prompts, device=self.device)
        if mask is None:  # diffusers' way to say that nothing is padded
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return PromptEmbeds(embeds, mask.bool())

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        rows, columns = self._token_grid(size)
        key = num_steps, rows * columns, shift
        if key not in self._schedules:
            config = self.pipeline.scheduler.config
            self._schedules[key] = flow_match_schedule(config, num_steps, rows * columns, shift=shift)
        return self._schedules[key]

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, self._latent_channels * PATCH**2

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        rows, columns = self._token_grid(size)
        return pack(seeded_noise(seeds, (self._latent_channels, rows * PATCH, columns * PATCH)))

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        return self._transform(expert, latents, timesteps, prompts, [self._token_grid(size)])

    def _transform(
        self, expert: Any, tokens: Tensor, timesteps: Tensor, prompts: PromptEmbeds, grids: Sequence[tuple[int, int]]
    ) -> Tensor:
        """The transformer's output (B, T, 4Z) float32 for tokens (B, T, 4Z) of pictures with these rows and columns."""
        special: dict[str, Any] = {}
        if prompts.half_widths is not None:
            special["attention_kwargs"] = {"half_widths": prompts.half_widths}
        if (table := table_of(expert)) is not None:
            special["additional_t_cond"] = self._rows(expert, table, len(tokens))
        output: Tensor = expert(
            hidden_states=tokens.to(self.dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=prompts.embeds.to(tokens.device, self.dtype),
            encoder_hidden_states_mask=prompts.mask.to(tokens.device) if prompts.has_padding else None,
            img_shapes=[[(1, *grid) for grid in grids]] * len(tokens),
            return_dict=False,
            **special,
        )[0]
        return output.float()

    def _rows(self, expert: Any, table: LevelTable, count: int) -> Tensor:
        """The table's rows of `count` samples, or of one for all of them; twice where condition images have a level of
        their own, which is 0."""
        rows = table.rows(self.levels)
        if len(rows) > 1:
            rows = rows.repeat(count // len(rows), 1, 1)
        if not expert.zero_cond_t:
            return rows
        return torch.cat([part.expand(count, *part.shape[1:]) for part in (rows, table.rows(torch.zeros(())))])

    def _guide(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        return guide(positive, negative, guidance.scale)

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        assert self._decoder is not None
        chunk = max(1, DECODE_CHUNK_PIXELS // (size.height * size.width))
        return torch.cat([to_uint8(self._pixels(part, size)) for part in torch.split(latents, chunk)])

    def checkpoint_decoding(self) -> None:
        assert self._decoder is not None
        self._decoder.checkpoints = True

    def compile_decoding(self) -> None:
        if self._decoder is not None:
            self._decoder.compile_activations()

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        assert self._decoder is not None
        planes = unpack(latents.to(self.device, torch.float32), *self._token_grid(size))
        planes = planes * self._latents_std.to(self.device) + self._latents_mean.to(self.device)
        pixels: Tensor = self._decoder(planes.to(self.vae.dtype))
        return pixels

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        pixels = to_pixels(frames).to(self.device, self.vae.dtype)
        planes = self.vae.encode(pixels).latent_dist.mode()[:, :, 0].float()
        planes = (planes - self._latents_mean.to(self.device)) / self._latents_std.to(self.device)
        return pack(planes).cpu()

    def _token_grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return token_grid(size, multiple=self._vae_scale * PATCH)


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance (B, T, C): n + scale (p - n), each token rescaled to the norm of p."""
    combined = negative + scale * (positive - negative)
    norm = combined.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(combined.dtype).tiny)
    rescaled: Tensor = combined * (positive.norm(dim=-1, keepdim=True) / norm)
    return rescaled
