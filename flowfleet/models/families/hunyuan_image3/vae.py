"""HunyuanImage-3.0's VAE: 3-D convolutions, 32 channels at 1/16 of height and width and, for videos, 1/4 of the frames.

A picture is encoded as `temporal` equal frames; its latents have one frame, whose decoding is the last of `temporal`.
Convolutions pad with zeros on all sides. Blocks are resized by moving pixels into channels and back, next to a shortcut
that averages or repeats channels, as in DC-AE, https://arxiv.org/abs/2410.10733. Names are those of published files.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

GROUPS = 32
EPS = 1e-6


class HunyuanImage3Vae(nn.Module):
    """Takes the `vae` of a checkpoint's config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        widths, channels = [int(width) for width in config["block_out_channels"]], int(config["latent_channels"])
        depth = int(config["layers_per_block"])
        spatial = int(math.log2(config["ffactor_spatial"]))
        temporal = int(math.log2(config["ffactor_temporal"]))
        self.num_frames = 2**temporal
        down = [(level < spatial, spatial - temporal <= level < spatial) for level in range(len(widths))]
        up = [(level < spatial, level < temporal) for level in range(len(widths))]
        self.encoder = Encoder(widths, channels, depth, down)
        self.decoder = Decoder(widths[::-1], channels, depth, up)

    def encode(self, pixels: Tensor) -> Tensor:
        """The mode (B, Z, h, w) of the latents of pixels (B, 3, H, W) in [-1, 1]."""
        moments: Tensor = self.encoder(pixels.unsqueeze(2).expand(-1, -1, self.num_frames, -1, -1))
        return moments.chunk(2, dim=1)[0].squeeze(2)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) of latents (B, Z, h, w)."""
        frames: Tensor = self.decoder(latents.unsqueeze(2))
        return frames[:, :, -1]


class Encoder(nn.Module):
    """Frames (B, 3, F, H, W) to mean and log-variance (B, 2 Z, f, h, w)."""

    def __init__(self, widths: Sequence[int], channels: int, depth: int, resized: Sequence[tuple[bool, bool]]) -> None:
        super().__init__()
        self.conv_in = _conv(3, widths[0])
        self.down = nn.ModuleList()
        inner = widths[0]
        for level, width in enumerate(widths):
            blocks = [ResnetBlock(inner if number == 0 else width, width) for number in range(depth)]
            is_resized, over_time = resized[level]
            inner = widths[level + 1] if is_resized else width
            self.down.append(Level(blocks, "downsample", Downsample(width, inner, over_time) if is_resized else None))
        self.mid = Middle(inner)
        self.norm_out = _norm(inner)
        self.conv_out = _conv(inner, 2 * channels)
        self.num_moments = 2 * channels

    def forward(self, frames: Tensor) -> Tensor:
        inner = self.conv_in(frames)
        for level in self.down:
            inner = level(inner)
        inner = self.mid(inner)
        batch, _, *grid = inner.shape
        shortcut = inner.reshape(batch, self.num_moments, -1, *grid).mean(2)
        out: Tensor = self.conv_out(F.silu(self.norm_out(inner))) + shortcut
        return out


class Decoder(nn.Module):
    """Latents (B, Z, f, h, w) to frames (B, 3, F, H, W)."""

    def __init__(self, widths: Sequence[int], channels: int, depth: int, resized: Sequence[tuple[bool, bool]]) -> None:
        super().__init__()
        self.conv_in = _conv(channels, widths[0])
        self.mid = Middle(widths[0])
        self.up = nn.ModuleList()
        inner = widths[0]
        for level, width in enumerate(widths):
            blocks = [ResnetBlock(inner if number == 0 else width, width) for number in range(depth + 1)]
            is_resized, over_time = resized[level]
            inner = widths[level + 1] if is_resized else width
            self.up.append(Level(blocks, "upsample", Upsample(width, inner, over_time) if is_resized else None))
        self.norm_out = _norm(inner)
        self.conv_out = _conv(inner, 3)
        self.checkpoints = False
        """True if the backward computes the activations of each part again."""

    def forward(self, latents: Tensor) -> Tensor:
        inner: Tensor = self.conv_in(latents)
        inner = inner + latents.repeat_interleave(inner.shape[1] // latents.shape[1], dim=1)
        levels: Sequence[Any] = list(self.up)
        is_kept = not (self.checkpoints and torch.is_grad_enabled())
        for part in (*self.mid.parts(), *(part for level in levels for part in level.parts()), self._end):
            inner = part(inner) if is_kept else checkpoint(part, inner, use_reentrant=False)
        return inner

    def _end(self, inner: Tensor) -> Tensor:
        out: Tensor = self.conv_out(F.silu(self.norm_out(inner)))
        return out


Part = Callable[[Tensor], Tensor]
"""A module from planes to planes."""


class Chain(nn.Module):
    """Modules one after the other."""

    def parts(self) -> list[Part]:
        """The modules of `forward` in their order."""
        raise NotImplementedError

    def forward(self, inner: Tensor) -> Tensor:
        for part in self.parts():
            inner = part(inner)
        return inner


class Level(Chain):
    """Blocks of one size, and what resizes their output."""

    def __init__(self, blocks: Sequence[nn.Module], name: str, resize: nn.Module | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(blocks)
        self._resize = name if resize is not None else None
        if resize is not None:
            self.add_module(name, resize)

    def parts(self) -> list[Part]:
        """The modules of `forward` in their order."""
        return [*self.block, *([] if self._resize is None else [getattr(self, self._resize)])]


class Middle(Chain):
    """Two blocks with attention between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(width, width)
        self.attn_1 = AttentionBlock(width)
        self.block_2 = ResnetBlock(width, width)

    def parts(self) -> list[Part]:
        """The modules of `forward` in their order."""
        return [self.block_1, self.attn_1, self.block_2]


class ResnetBlock(nn.Module):
    """Two convolutions, each after a group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inputs), _conv(inputs, outputs)
        self.norm2, self.conv2 = _norm(outputs), _conv(outputs, outputs)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv3d(inputs, outputs, 1)

    def forward(self, inner: Tensor) -> Tensor:
        shortcut = self.nin_shortcut(inner) if hasattr(self, "nin_shortcut") else inner
        out: Tensor = shortcut + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(inner))))))
        return out


class AttentionBlock(nn.Module):
    """Attention of one head between all pixels of all frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv3d(width, width, 1) for _ in range(4))

    def forward(self, inner: Tensor) -> Tensor:
        normed = self.norm(inner)
        query, key, value = (layer(normed).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj_out(attended[:, 0].transpose(1, 2).reshape(inner.shape))
        return inner + out


class Downsample(nn.Module):
    """Halves height and width, and the frames if `over_time`."""

    def __init__(self, inputs: int, outputs: int, over_time: bool) -> None:
        super().__init__()
        self.frames = 2 if over_time else 1
        self.conv = _conv(inputs, outputs // (4 * self.frames))

    def forward(self, inner: Tensor) -> Tensor:
        moved = to_channels(self.conv(inner), self.frames)
        shortcut = to_channels(inner, self.frames)
        batch, channels, *grid = moved.shape
        averaged: Tensor = shortcut.reshape(batch, channels, -1, *grid).mean(2)
        return moved + averaged


class Upsample(nn.Module):
    """Doubles height and width, and the frames if `over_time`."""

    def __init__(self, inputs: int, outputs: int, over_time: bool) -> None:
        super().__init__()
        self.frames = 2 if over_time else 1
        self.repeats = 4 * self.frames * outputs // inputs
        self.conv = _conv(inputs, outputs * 4 * self.frames)

    def forward(self, inner: Tensor) -> Tensor:
        shortcut = inner.repeat_interleave(self.repeats, dim=1)
        return from_channels(self.conv(inner), self.frames) + from_channels(shortcut, self.frames)


def to_channels(planes: Tensor, frames: int) -> Tensor:
    """(B, C, f r, 2 h, 2 w) to (B, r 4 C, f, h, w): the place inside a block counts before the channel."""
    batch, channels, depth, height, width = planes.shape
    split = planes.reshape(batch, channels, depth // frames, frames, height // 2, 2, width // 2, 2)
    return split.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


def from_channels(planes: Tensor, frames: int) -> Tensor:
    """Undoes `to_channels`."""
    batch, channels, depth, height, width = planes.shape
    split = planes.reshape(batch, frames, 2, 2, channels // (4 * frames), depth, height, width)
    return split.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _conv(inputs: int, outputs: int) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, eps=EPS)
