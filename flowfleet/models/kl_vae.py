"""Pictures to and from the latents of diffusers' `AutoencoderKL`, the VAE of Stable Diffusion 3, FLUX and others.

A transformer sees (z - shift) * scaling, where z is what the VAE makes; both numbers are in the VAE's configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from numpy.typing import ArrayLike
from torch import Tensor

from flowfleet.models.base import ModelAdapter, Schedule, to_pixels, to_uint8
from flowfleet.models.packing import PATCH, token_grid
from flowfleet.models.schedules import even_levels, flow_match_schedule
from flowfleet.models.settings import Size

CHUNK_PIXELS = 1024 * 1024
"""Pixels decoded or encoded at once: bounds the memory of activations."""


class PictureVae:
    """The VAE as a codec of pictures. Its geometry is known even if its weights are not loaded."""

    def __init__(self, config: Mapping[str, Any], vae: Any) -> None:
        """Takes the configuration of an `AutoencoderKL` or `AutoencoderDC`, and that model or None. A factor or a shift
        that it does not have changes nothing."""
        levels = config.get("block_out_channels") or config["encoder_block_out_channels"]
        self.scale = 2 ** (len(levels) - 1)
        """Pixels that a latent pixel is wide and high."""
        self.channels = int(config["latent_channels"])
        self._scaling = float(config.get("scaling_factor") or 1.0)
        self._shift = float(config.get("shift_factor") or 0.0)
        self._vae = vae

    def decode(self, planes: Tensor) -> Tensor:
        """Frames (B, 1, H, W, 3) uint8 on the CPU of latents (B, Z, H/scale, W/scale)."""
        return _in_chunks(self._decode, planes, planes.shape[-2] * planes.shape[-1] * self.scale**2)

    def encode(self, frames: Tensor) -> Tensor:
        """Latents (B, Z, H/scale, W/scale) float32 on the CPU of frames (B, 1, H, W, 3) uint8: the posterior's mode."""
        return _in_chunks(self._encode, frames, frames.shape[2] * frames.shape[3])

    def pixels(self, planes: Tensor) -> Tensor:
        """(B, 3, H, W) about -1 to 1 of latents (B, Z, H/scale, W/scale), all at once and with gradient."""
        latents = planes.to(self._vae.device, torch.float32) / self._scaling + self._shift
        pixels: Tensor = self._vae.decode(latents.to(self._vae.dtype), return_dict=False)[0]
        return pixels

    def _decode(self, planes: Tensor) -> Tensor:
        return to_uint8(self.pixels(planes))

    def _encode(self, frames: Tensor) -> Tensor:
        pixels = to_pixels(frames)[:, :, 0].to(self._vae.device, self._vae.dtype)
        encoded = self._vae.encode(pixels)
        latents: Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        return ((latents.float() - self._shift) * self._scaling).cpu()


class PictureAdapter(ModelAdapter):
    """Base of families that draw pictures with such a VAE, from its latents as they are or packed."""

    vae_class = AutoencoderKL

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._vae = PictureVae(vae_config, self.vae)

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        rows, columns = self._token_grid(size)
        config, mu = self.pipeline.scheduler.config, self._mu(num_steps, rows * columns)
        return flow_match_schedule(config, num_steps, rows * columns, shift=shift, levels=self._levels, mu=mu)

    def _levels(self, num_steps: int) -> ArrayLike | None:
        """See `Levels`."""
        return even_levels(num_steps)

    def _mu(self, num_steps: int, num_tokens: int) -> float | None:
        """See `flow_match_schedule`."""
        return None

    def _planes(self, latents: Tensor, size: Size) -> Tensor:
        """(B, Z, H/scale, W/scale) of final latents."""
        return latents

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        return self._vae.decode(self._planes(latents, size))

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        return self._vae.pixels(self._planes(latents, size))

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        return self._vae.encode(frames)

    def _token_grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return token_grid(size, multiple=self._vae.scale * PATCH)


def _in_chunks(convert: Callable[[Tensor], Tensor], batch: Tensor, pixels: int) -> Tensor:
    """`convert` of a batch, as many rows at a time as CHUNK_PIXELS allow; `pixels` of one row."""
    return torch.cat([convert(part) for part in torch.split(batch, max(1, CHUNK_PIXELS // pixels))])
