"""Teaches the autoencoder to compress scenes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from torch.nn import functional

from flowfleet.models.packing import pack
from recipes.composition.base.training import Recipe, Report, train
from recipes.tiny.components import round_to_half
from recipes.tiny.training import autocast, reconstruction_loss, to_video

LATENT_NOISE = 0.03
ENCODE_BATCH = 512


class FrameConv(QwenImageCausalConv3d):  # type: ignore[misc]
    """What a causal convolution is for one frame: the 2-D convolution with the last slice of its kernel.

    The frames before the first are zeros, so the other slices meet nothing.
    """

    def forward(self, x: Tensor, cache_x: None = None) -> Tensor:
        """(B, C, 1, h, w) to (B, C', 1, h', w')."""
        assert x.shape[2] == 1, "videos need the causal convolution"
        assert cache_x is None
        margins = self._padding[2], self._padding[0]
        return functional.conv2d(
            x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], padding=margins
        ).unsqueeze(2)


@contextmanager
def single_frames(vae: Any) -> Iterator[None]:
    """Makes the autoencoder three times as fast within, for pictures alone."""
    convolutions = [module for module in vae.modules() if type(module) is QwenImageCausalConv3d]
    for module in convolutions:
        module.__class__ = FrameConv
    try:
        yield
    finally:
        for module in convolutions:
            module.__class__ = QwenImageCausalConv3d


def encode_modes(vae: Any, images: Tensor) -> Tensor:
    """Modes of the posterior (B, Z, 1, h, w) of images (B, 3, 1, H, W) in −1 … 1, as `vae.encode` gives them."""
    modes: Tensor = vae.quant_conv(vae.encoder(images)).chunk(2, dim=1)[0]
    return modes


def train_autoencoder(
    vae: Any, pixels: Tensor, recipe: Recipe, batch_size: int, larger: Tensor | None = None
) -> list[Report]:
    """Teaches it `pixels` (N, 3, H, W) uint8 on its device, in place; its weights end rounded to fp16, and frozen.

    `larger`: more of them, (M, 3, H', W'), of which each step also learns, as many pixels of both.

    Latents are the mode of the posterior, trained with a little noise so that the decoder forgives small errors. Their
    mean and standard deviation go into its configuration. Returns the reports of `train`.
    """
    device = pixels.device

    def loss() -> Tensor:
        if larger is None:
            return loss_of(pixels, batch_size)
        fewer = max(1, batch_size * pixels[0].numel() // larger[0].numel())
        return (loss_of(pixels, batch_size) + loss_of(larger, fewer)) / 2

    def loss_of(drawn_from: Tensor, num: int) -> Tensor:
        images = to_video(drawn_from.index_select(0, torch.randint(len(drawn_from), (num,), device=device)))
        images = images.contiguous(memory_format=torch.channels_last_3d)
        with autocast(device):
            modes = encode_modes(vae, images)
            noisy = modes + LATENT_NOISE * torch.randn_like(modes)
            painted = vae.decoder(vae.post_quant_conv(noisy))
        return reconstruction_loss(images, modes, painted)

    with single_frames(vae):
        reports = train("autoencoder", list(vae.parameters()), loss, recipe)
        round_to_half(vae.eval().requires_grad_(False))
        with torch.no_grad():
            parts = [encode_modes(vae, to_video(part)) for part in torch.split(pixels[:4096], ENCODE_BATCH)]
    modes = torch.cat(parts)
    mean, std = modes.mean(dim=(0, 2, 3, 4)), modes.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return reports


@torch.no_grad()
def encode_pixels(vae: Any, pixels: Tensor) -> Tensor:
    """Packed, normalized latents (N, tokens, 64) float32 of pixels (N, 3, H, W) uint8."""
    mean, std = (
        torch.tensor(numbers, device=pixels.device)[:, None, None]
        for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    with single_frames(vae):
        parts = [encode_modes(vae, to_video(part))[:, :, 0] for part in torch.split(pixels, ENCODE_BATCH)]
    return torch.cat([pack((part.float() - mean) / std) for part in parts])


@torch.no_grad()
def fidelity(vae: Any, pixels: Tensor) -> float:
    """Peak signal-to-noise ratio, in decibels, of pixels (N, 3, H, W) uint8 once encoded and decoded."""
    images = to_video(pixels)
    with single_frames(vae):
        painted = vae.decoder(vae.post_quant_conv(encode_modes(vae, images))).clamp(-1, 1)
    return -10 * math.log10(((painted - images) / 2).square().mean().item())
