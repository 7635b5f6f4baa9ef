"""HunyuanVideo-1.5, https://arxiv.org/abs/2511.18870, on the components of diffusers' `HunyuanVideo15Pipeline` and
`HunyuanVideo15ImageToVideoPipeline`.

A prompt is up to 1,000 tokens of Qwen2.5-VL, cut to its own length, and what it quotes as up to 256 of ByT5, the extra
`glyphs`, whose mask is `glyph_mask`. The transformer sees further channels than the latents: the first frame, which the
prompt's image gives, and a mask of it; zeros for a video from text. The image is also seen by SigLIP, the extra `seen`.
All of a sample's latents are free.
"""

import inspect
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from flowfleet.models.base import Schedule, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.loading import USUAL_PARTS, Parts
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.video_vae import FIRST_FRAME, VideoAdapter

NUM_GLYPHS, NUM_SEEN = 256, 729
"""Tokens of ByT5, and of SigLIP."""


def _without_vae(kind: Any) -> Any:
    """The pipeline's class, which can be made without a VAE here."""

    def make(self: Any, vae: Any, **parts: Any) -> None:
        kind.__init__(self, vae=vae or _NoVae(), **parts)
        self.register_modules(vae=vae)

    make.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__init__": make, "__module__": __name__})


class _NoVae:
    temporal_compression_ratio, spatial_compression_ratio = 4, 16
    config = SimpleNamespace(latent_channels=32)


class HunyuanVideo15Adapter(VideoAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = _without_vae(HunyuanVideo15Pipeline)
    vae_class: ClassVar[Any] = AutoencoderKLHunyuanVideo15
    text_width = "text_embed_dim"
    patch = 1
    decodes_batches = False  # diffusers 0.42's attention there has a mask of another shape
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    parts: ClassVar[Parts] = {
        **USUAL_PARTS,
        "text_encoder": ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
    }

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._spatial_scale = int(vae_config["spatial_compression_ratio"])
        self._temporal_scale = int(vae_config["temporal_compression_ratio"])
        self._latent_channels = int(vae_config["latent_channels"])
        self._latents_mean, self._latents_std = torch.zeros(1), torch.tensor(1 / vae_config["scaling_factor"])
        for expert in self.experts.values():
            expert.forward = MethodType(_forward, expert)

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        return self._encode_text(prompts)

    def _encode_text(self, prompts: list[str]) -> PromptEmbeds:
        texts, text_mask, glyphs, glyph_mask = self.pipeline.encode_prompt(
            prompts, device=self.device, batch_size=len(prompts)
        )
        extras = {"glyphs": glyphs, "glyph_mask": glyph_mask.bool()}
        return PromptEmbeds(texts * text_mask[..., None], text_mask.bool(), extras).trimmed()

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        blank = super().blank_prompts(count, num_tokens)
        glyphs = blank.embeds.new_zeros(count, NUM_GLYPHS, self.transformer.config.text_embed_2_dim)
        return replace(blank, extras={"glyphs": glyphs, "glyph_mask": torch.zeros_like(glyphs[..., 0]).bool()})

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        return flow_match_schedule(self.pipeline.scheduler.config, num_steps, 0, shift=shift, levels=_levels)

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        extras = {name: extra.to(latents.device) for name, extra in prompts.extras.items()}
        given, mask = torch.zeros_like(latents), torch.zeros_like(latents[:, :1])
        if FIRST_FRAME in extras:
            given[:, :, :1], mask[:, :, :1] = extras[FIRST_FRAME], 1
        seen = extras.get("seen")
        output: Tensor = expert(
            torch.cat([latents, given, mask], dim=1).to(self.dtype),
            timesteps.to(self.dtype),
            prompts.embeds.to(latents.device, self.dtype),
            prompts.mask.to(latents.device),
            extras["glyphs"].to(self.dtype),
            extras["glyph_mask"],
            None if seen is None else seen.to(self.dtype),
        )
        return output.float()


class HunyuanVideo15ImageAdapter(HunyuanVideo15Adapter):
    """See `ModelAdapter`."""

    pipeline_class = _without_vae(HunyuanVideo15ImageToVideoPipeline)
    parts: ClassVar[Parts] = {
        **HunyuanVideo15Adapter.parts,
        "text_encoder": (*HunyuanVideo15Adapter.parts["text_encoder"], "image_encoder", "feature_extractor"),
    }

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        if images is None or any(len(row) != 1 for row in images):
            raise ValueError("this model takes one condition image a prompt, the first frame: give each prompt one")
        encoded, pipeline, size = self._encode_text(prompts), self.pipeline, self._condition_size
        assert size is not None, "see size_conditions"
        cropped = [
            pipeline.video_processor.resize(picture.convert("RGB"), size.height, size.width, resize_mode="crop")
            for (picture,) in images
        ]
        seen = [pipeline.encode_image(one, 1, self.device, self.dtype) for one in cropped]
        framed = self._with_images(encoded, [[one] for one in cropped])
        return replace(framed, extras={**encoded.extras, **framed.extras, "seen": torch.cat(seen)})

    def blank_conditions(self, count: int, size: Size) -> dict[str, Tensor]:
        channels, _, *sides = self.latent_shape(size)
        width = self.transformer.config.image_embed_dim
        return {
            FIRST_FRAME: torch.zeros(count, channels, 1, *sides, device=self.device),
            "seen": torch.zeros(count, NUM_SEEN, width, dtype=self.dtype, device=self.device),
        }


def _levels(num_steps: int) -> ArrayLike:
    return np.linspace(1.0, 0.0, num_steps + 1)[:-1]


def _forward(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    texts: Tensor,
    text_mask: Tensor,
    glyphs: Tensor,
    glyph_mask: Tensor,
    seen: Tensor | None,
) -> Tensor:
    """The transformer's forward. diffusers' own sorts each row's tokens by their masks, for which it waits for the
    device and has no answer on the meta device. Tokens of prompts have no positions, so their order does not matter."""
    embedded, rotary = self.time_embed(timestep), self.rope(hidden_states)
    batch, _, frames, height, width = hidden_states.shape
    videos = self.x_embedder(hidden_states)
    parts = [(0, self.context_embedder(texts, timestep, text_mask), text_mask)]
    parts.append((1, self.context_embedder_2(glyphs), glyph_mask))
    if seen is not None:
        parts.append((2, self.image_embedder(seen), text_mask.new_ones(seen.shape[:2])))
    kinds = [self.cond_type_embed(torch.full_like(mask, kind, dtype=torch.long)) for kind, _, mask in parts]
    conditions = torch.cat(
        [(tokens + kind) * mask[..., None] for kind, (_, tokens, mask) in zip(kinds, parts, strict=True)], dim=1
    )
    masks = torch.cat([mask for *_, mask in parts], dim=1)
    for block in self.transformer_blocks:
        videos, conditions = block(videos, conditions, embedded, masks, rotary)
    output: Tensor = self.proj_out(self.norm_out(videos, embedded))
    across, deep = self.config.patch_size, self.config.patch_size_t
    output = output.reshape(batch, frames // deep, height // across, width // across, -1, deep, across, across)
    return output.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
