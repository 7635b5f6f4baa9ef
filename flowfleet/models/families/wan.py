"""Wan 2.1 and 2.2 text to video, https://arxiv.org/abs/2503.20314, on the components of diffusers' `WanPipeline`.

One adapter serves three kinds of checkpoint, told apart by what they hold:

- one transformer (Wan2.1, every size);
- two experts (Wan2.2 A14B): `transformer` where sigma reaches the pipeline's `boundary_ratio`, else `transformer_2`;
- a timestep a token (Wan2.2 TI2V 5B, the pipeline's `expand_timesteps`), whose VAE has 48 channels at 1/16 size.

Latents are (B, Z, f, h, w): f = (num_frames - 1) / 4 + 1 latent frames of height / 8 by width / 8, with the 5B model's
VAE height / 16 by width / 16. The transformer sees prompts as 512 tokens of which the last are zero vectors, without a
mask; `encode` gives them no longer than they are, and the zeros are put back before each forward.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.pipelines.wan import pipeline_wan
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter, Schedule, to_pixels, to_uint8, without_images
from flowfleet.models.embeds import PromptEmbeds, pad_embeds
from flowfleet.models.loading import Component
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.settings import Guidance, Size

PATCH = 2
"""Latent pixels that a token is wide and high; it is one latent frame deep."""
CHUNK_PIXELS = 2**22
"""Pixels of all frames that pass the VAE at once, though at least one video: bounds the memory of activations."""


class WanAdapter(ModelAdapter):
    """See `ModelAdapter`."""

    pipeline_class = WanPipeline
    vae_class = AutoencoderKLWan
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    parts: ClassVar[Mapping[Component, tuple[str, ...]]] = {
        **ModelAdapter.parts,
        "transformer": ("transformer", "transformer_2"),
    }
    text_width = "text_dim"
    sequence_patch = PATCH**2
    vae_dtype = torch.float32
    """Data type in which diffusers' examples load the VAE, whatever the rest uses."""
    max_sequence_length: int = 512
    """Tokens of UMT5 that the transformer sees of every prompt; longer prompts are cut, as by the pipeline."""

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self.boundary = pipeline.config.boundary_ratio
        self._timestep_per_token = bool(pipeline.config.expand_timesteps)
        self._spatial_scale = int(vae_config["scale_factor_spatial"])
        self._temporal_scale = int(vae_config["scale_factor_temporal"])
        self._latent_channels = int(vae_config["z_dim"])
        self._latents_mean = torch.tensor(vae_config["latents_mean"]).reshape(1, -1, 1, 1, 1)
        self._latents_std = torch.tensor(vae_config["latents_std"]).reshape(1, -1, 1, 1, 1)
        self._schedules: dict[tuple[int, float | None], Schedule] = {}

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
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

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """The same for every size; see `euler_schedule`."""
        key = num_steps, shift
        if key not in self._schedules:
            self._schedules[key] = euler_schedule(self.pipeline.scheduler.config, num_steps, shift)
        return self._schedules[key]

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        multiple = self._spatial_scale * PATCH
        height, width, frames = size.height, size.width, size.num_frames
        if height < multiple or width < multiple or height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, but are {height} and {width}")
        if frames < 1 or frames % self._temporal_scale != 1:
            examples = ", ".join(str(count * self._temporal_scale + 1) for count in (1, 2, 20))
            raise ValueError(
                f"num_frames must be 1 more than a multiple of {self._temporal_scale} (1, {examples}, …), "
                f"but it is {frames}"
            )
        latent_frames = (frames - 1) // self._temporal_scale + 1
        return self._latent_channels, latent_frames, height // self._spatial_scale, width // self._spatial_scale

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        if self._timestep_per_token:
            frames, height, width = latents.shape[2:]
            timesteps = timesteps[:, None].expand(-1, frames * (height // PATCH) * (width // PATCH))
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=pad_embeds(prompts, self.max_sequence_length).embeds.to(latents.device, self.dtype),
            return_dict=False,
        )[0]
        return output.float()

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        return torch.cat([to_uint8(self._videos(part)) for part in torch.split(latents, _rows_at_once(size))])

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
        return torch.cat([self._encode_chunk(part) for part in torch.split(frames, _rows_at_once(size))])

    def _encode_chunk(self, frames: Tensor) -> Tensor:
        pixels = to_pixels(frames.to(self.device)).to(self.vae.dtype)
        planes = self.vae.encode(pixels).latent_dist.mode().float()
        latents: Tensor = (planes - self._latents_mean.to(self.device)) / self._latents_std.to(self.device)
        return latents.cpu()


def euler_schedule(config: Mapping[str, Any], num_steps: int, shift: float | None = None) -> Schedule:
    """Wan's noise levels for first-order steps: sigma = s u / (1 + (s - 1) u) over u = linspace(1, 1/N, N), then 0.

    Wan's checkpoints carry a UniPC multistep scheduler, whose steps have no density to learn from; these are its noise
    levels, to its rounding of timesteps. A checkpoint that was saved with a `FlowMatchEulerDiscreteScheduler` gets the
    same ones. That scheduler by itself would shift twice, as `WanPipeline` hands it no levels: it starts from a range
    that its constructor has shifted already.

    Args:
        config: of the checkpoint's scheduler. s is its `flow_shift` (UniPC and the other multistep solvers), or its
            `shift` if it is a `FlowMatchEulerDiscreteScheduler`, whose other settings then count as well.
        num_steps: N, at least 1.
        shift: s of the job; None is the checkpoint's.

    Raises:
        ValueError: no steps, a scheduler that does not follow a flow, or one whose shift depends on the size.
    """
    return flow_match_schedule(_euler_config(config), num_steps, 0, shift=shift)


def _euler_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("use_dynamic_shifting"):
        raise ValueError(
            "Wan's schedule has one shift for all sizes: set use_dynamic_shifting to false in the checkpoint's "
            "scheduler_config.json"
        )
    if "shift" in config:
        return config
    if config.get("prediction_type") != "flow_prediction" or "flow_shift" not in config:
        raise ValueError(
            "the checkpoint's scheduler_config.json is of no flow: it needs prediction_type flow_prediction and a "
            "flow_shift, or be that of a FlowMatchEulerDiscreteScheduler"
        )
    return {"num_train_timesteps": config["num_train_timesteps"], "shift": config["flow_shift"]}


def _rows_at_once(size: Size) -> int:
    """Videos that pass the VAE together."""
    return max(1, CHUNK_PIXELS // (size.num_frames * size.height * size.width))
