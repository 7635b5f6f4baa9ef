"""FLUX.1, https://github.com/black-forest-labs/flux, on the components of diffusers' `FluxPipeline`.

Latents travel packed, as the transformer takes them: (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels. A
prompt is 512 tokens of T5, all of which the transformer attends to, padding included, so no mask has a False; the
pooled CLIP embedding travels as the extra `pooled`. A guidance-distilled checkpoint (FLUX.1-dev) takes a guidance
strength as an input; classifier-free guidance with two forwards works on every checkpoint besides.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import seeded_noise, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.loading import Parts
from flowfleet.models.packing import PATCH, pack, unpack
from flowfleet.models.settings import Guidance, Size

EMBEDDED_GUIDANCE = 3.5
"""The pipeline's default of `guidance_scale`."""


class FluxAdapter(PictureAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = FluxPipeline
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    parts: ClassVar[Parts] = {
        "transformer": ("transformer",),
        "text_encoder": ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
        "vae": ("vae",),
    }

    max_sequence_length: int = 512
    """Tokens of T5."""

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return PromptEmbeds.whole(embeds, {"pooled": pooled})

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        blank = super().blank_prompts(count, self.max_sequence_length)
        width = self.transformer.config.get("pooled_projection_dim")  # relatives of FLUX.1 have none
        return replace(blank, extras={"pooled": blank.embeds.new_zeros(count, width)} if width else {})

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, self._vae.channels * PATCH**2

    def shared_tokens(self, size: Size) -> tuple[int, ...]:
        return *super().shared_tokens(size), self.max_sequence_length

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        rows, columns = self._token_grid(size)
        return pack(seeded_noise(seeds, (self._vae.channels, rows * PATCH, columns * PATCH)))

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        return self._transform(expert, latents, position_ids(*self._token_grid(size)), timesteps, prompts, guidance)

    def _transform(
        self,
        expert: Any,
        tokens: Tensor,
        positions: Tensor,
        timesteps: Tensor,
        prompts: PromptEmbeds,
        guidance: Guidance,
    ) -> Tensor:
        """The transformer's output (B, T, 4Z) float32 for tokens (B, T, 4Z) at positions (T, 3)."""
        assert not prompts.has_padding, "this transformer has no mask"
        output: Tensor = expert(
            hidden_states=tokens.to(self.dtype),
            timestep=timesteps / 1000,
            guidance=self._embedded_guidance(timesteps, guidance),
            pooled_projections=prompts.extras["pooled"].to(tokens.device, self.dtype),
            encoder_hidden_states=prompts.embeds.to(tokens.device, self.dtype),
            txt_ids=tokens.new_zeros(prompts.embeds.shape[1], 3),
            img_ids=positions.to(tokens.device),
            return_dict=False,
        )[0]
        return output.float()

    def _embedded_guidance(self, like: Tensor, guidance: Guidance) -> Tensor | None:
        """(B,) float32 as `like`, or None if the checkpoint has no such input."""
        if self.transformer.config.guidance_embeds:
            return torch.full_like(like, EMBEDDED_GUIDANCE if guidance.embedded is None else guidance.embedded)
        if guidance.embedded is not None:
            raise ValueError("this checkpoint takes no embedded guidance: leave rollout.embedded_guidance out")
        return None

    def _planes(self, latents: Tensor, size: Size) -> Tensor:
        return unpack(latents, *self._token_grid(size))

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        return pack(self._vae.encode(frames))


def position_ids(rows: int, columns: int, picture: int = 0) -> Tensor:
    """(rows * columns, 3) float32: number of the picture, row and column of each token, for the rotary embedding."""
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return torch.nn.functional.pad(grid, (1, 0), value=picture).float()
