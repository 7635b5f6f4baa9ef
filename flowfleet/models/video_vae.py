"""Videos to and from the latents of causal video VAEs, and the frames that a prompt's image gives.

Latents are (B, Z, f, h, w): f = (num_frames - 1) / t + 1 latent frames of height / s by width / s, normalized by a mean
and a deviation a channel. With `Size.clean_frames` a video begins with the prompt's image: that latent frame travels as
the extra `first_frame`, (B, Z, 1, h, w), and a sample's latents are the frames after it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter, to_pixels, to_uint8
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.settings import Size

FIRST_FRAME = "first_frame"
"""Name of the extra."""
CHUNK_PIXELS = 2**22
"""Pixels of all frames that pass the VAE at once, though at least one video: bounds the memory of activations."""


class VideoAdapter(ModelAdapter):
    """Base of families that make videos. A family sets the attributes that have no value here."""

    patch: ClassVar[int]
    """Latent pixels that a token is wide and high; it is one latent frame deep."""
    _spatial_scale: int
    _temporal_scale: int
    _latent_channels: int
    _latents_mean: Tensor
    _latents_std: Tensor
    """These two broadcast to latents."""
    _condition_size: Size | None = None
    decodes_batches: ClassVar[bool] = True
    """False for a VAE that takes one video at a time."""

    def size_conditions(self, size: Size) -> None:
        self._condition_size = size

    def _with_images(self, encoded: PromptEmbeds, images: list[list[Image.Image]] | None) -> PromptEmbeds:
        """Adds the first frames of the videos."""
        if not images or not any(images):
            return encoded
        if any(len(row) != 1 for row in images):
            raise ValueError("this model takes one condition image a prompt, the first frame: give each prompt one")
        frames = [self._normalized(self._pixels_of(picture)[:, :, None]) for (picture,) in images]
        return replace(encoded, extras={**encoded.extras, FIRST_FRAME: torch.cat(frames)})

    def _pixels_of(self, picture: Image.Image) -> Tensor:
        """(1, 3, H, W) from -1 to 1, stretched to the sample's size as the pipelines do."""
        size = self._condition_size
        if self.vae is None or size is None:
            raise ValueError("encode needs the VAE and the sample's size for condition images: see size_conditions")
        processor = self.pipeline.video_processor
        pixels: Tensor = processor.preprocess(picture.convert("RGB"), height=size.height, width=size.width)
        return pixels

    def blank_conditions(self, count: int, size: Size) -> dict[str, Tensor]:
        if not size.clean_frames:
            return {}
        channels, _, height, width = self.latent_shape(size)
        return {FIRST_FRAME: torch.zeros(count, channels, 1, height, width, device=self.device)}

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        multiple = self._spatial_scale * self.patch
        height, width, frames = size.height, size.width, size.num_frames
        if height < multiple or width < multiple or height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, but are {height} and {width}")
        if frames < 1 or frames % self._temporal_scale != 1:
            examples = ", ".join(str(count * self._temporal_scale + 1) for count in (1, 2, 20))
            raise ValueError(
                f"num_frames must be 1 more than a multiple of {self._temporal_scale} (1, {examples}, …), "
                f"but it is {frames}"
            )
        latent_frames = (frames - 1) // self._temporal_scale + 1 - size.clean_frames
        if size.clean_frames > self.clean_frames or not latent_frames:
            raise ValueError(
                "a video from an image needs a checkpoint with a timestep per token (Wan2.2 TI2V) and at least "
                f"{self._temporal_scale + 1} frames: remove rollout.from_image, or raise rollout.num_frames"
            )
        return self._latent_channels, latent_frames, height // self._spatial_scale, width // self._spatial_scale

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        return super().initial_latents(seeds, size.whole)[:, :, size.clean_frames :].contiguous()

    def _joined(self, latents: Tensor, prompts: PromptEmbeds) -> Tensor:
        if FIRST_FRAME not in prompts.extras:
            raise ValueError("these prompts have no first frame: encode them with `images`")
        return torch.cat([prompts.extras[FIRST_FRAME].to(latents.device, latents.dtype), latents], dim=2)

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        return torch.cat([to_uint8(self._videos(part)) for part in torch.split(latents, self._rows_at_once(size))])

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        return self._videos(latents)[:, :, 0]

    def _videos(self, latents: Tensor) -> Tensor:
        """(B, 3, F, H, W) from -1 to 1, with gradient."""
        planes = latents.to(self.device, torch.float32)
        planes = planes * self._latents_std.to(self.device) + self._latents_mean.to(self.device)
        videos: Tensor = self.vae.decode(planes.to(self.vae.dtype), return_dict=False)[0]
        return videos

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        self.latent_shape(size)
        parts = torch.split(frames, self._rows_at_once(size))
        latents = [self._normalized(to_pixels(part.to(self.device))).cpu() for part in parts]
        return torch.cat(latents)[:, :, size.clean_frames :]

    def _normalized(self, pixels: Tensor) -> Tensor:
        """Latents (B, Z, f, h, w) float32 on the adapter's device of pixels (B, 3, F, H, W)."""
        planes = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode().float()
        latents: Tensor = (planes - self._latents_mean.to(self.device)) / self._latents_std.to(self.device)
        return latents

    def _rows_at_once(self, size: Size) -> int:
        """Videos that pass the VAE together."""
        rows = max(1, CHUNK_PIXELS // (size.num_frames * size.height * size.width))
        return rows if self.decodes_batches else 1
