"""Pictures to and from the latents of diffusers' `AutoencoderKL`, the VAE of Stable Diffusion 3, FLUX and others.

A transformer sees (z - shift) * scaling, where z is what the VAE makes; both numbers are in the VAE's configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowfleet.models.base import to_pixels, to_uint8

CHUNK_PIXELS = 1024 * 1024
"""Pixels decoded or encoded at once: bounds the memory of activations."""


class PictureVae:
    """The VAE as a codec of pictures. Its geometry is known even if its weights are not loaded."""

    def __init__(self, config: Mapping[str, Any], vae: Any) -> None:
        """Takes an `AutoencoderKL`'s configuration, and the `AutoencoderKL` or None."""
        self.scale = 2 ** (len(config["block_out_channels"]) - 1)
        """Pixels that a latent pixel is wide and high."""
        self.channels = int(config["latent_channels"])
        self._scaling = float(config["scaling_factor"])
        self._shift = float(config["shift_factor"] or 0.0)
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
        latents: Tensor = self._vae.encode(pixels).latent_dist.mode().float()
        return ((latents - self._shift) * self._scaling).cpu()


def _in_chunks(convert: Callable[[Tensor], Tensor], batch: Tensor, pixels: int) -> Tensor:
    """`convert` of a batch, as many rows at a time as CHUNK_PIXELS allow; `pixels` of one row."""
    return torch.cat([convert(part) for part in torch.split(batch, max(1, CHUNK_PIXELS // pixels))])
