"""Pictures to and from the latents of Qwen-Image's VAE, packed as tokens of 2x2 latent pixels: (B, T, 4Z) with
T = (H/16)(W/16). Qwen-Image and Krea 2 take them."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from flowfleet.models.base import ModelAdapter, Schedule, seeded_noise, to_pixels, to_uint8
from flowfleet.models.packing import PATCH, pack, token_grid, unpack
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.settings import Size
from flowfleet.models.single_frame import SingleFrameDecoder

DECODE_CHUNK_PIXELS = 1024 * 1024
"""Pixels decoded at once: bounds the memory of activations."""


class QwenVaeAdapter(ModelAdapter):
    """Base of families that draw pictures with this VAE."""

    vae_class = AutoencoderKLQwenImage

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._vae_scale = 2 ** len(vae_config["temperal_downsample"])
        self._latent_channels = int(vae_config["z_dim"])
        self._latents_mean = torch.tensor(vae_config["latents_mean"]).reshape(1, -1, 1, 1)
        self._latents_std = torch.tensor(vae_config["latents_std"]).reshape(1, -1, 1, 1)
        self._decoder = None if self.vae is None else SingleFrameDecoder(self.vae)
        self._mu: float | None = None
        """See `flow_match_schedule`."""
        self._schedules: dict[tuple[int, int, float | None], Schedule] = {}

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        rows, columns = self._token_grid(size)
        key = num_steps, rows * columns, shift
        if key not in self._schedules:
            config, mu = self.pipeline.scheduler.config, self._mu
            self._schedules[key] = flow_match_schedule(config, num_steps, rows * columns, shift=shift, mu=mu)
        return self._schedules[key]

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, self._latent_channels * PATCH**2

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        rows, columns = self._token_grid(size)
        return pack(seeded_noise(seeds, (self._latent_channels, rows * PATCH, columns * PATCH)))

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
        if getattr(self.vae, "use_tiling", False):
            tiled: Tensor = self.vae.decode(planes.to(self.vae.dtype)[:, :, None], return_dict=False)[0]
            return tiled[:, :, 0]
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
