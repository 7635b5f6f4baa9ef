"""Stable Diffusion 3 and 3.5, https://arxiv.org/abs/2403.03206, on the components of `StableDiffusion3Pipeline`.

Latents are spatial, (B, 16, H/8, W/8). A prompt is 77 tokens of both CLIPs side by side, padded with zeros to the width
of T5, then 256 tokens of T5; a checkpoint without T5 has zeros there. The transformer attends to all of them, padding
included, so no mask has a False. The pooled CLIP embeddings travel as the extra `pooled`.
"""

from dataclasses import replace
from typing import Any, ClassVar

from diffusers import StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.loading import Parts
from flowfleet.models.packing import token_grid
from flowfleet.models.schedules import scheduler_levels
from flowfleet.models.settings import Guidance, Size

NUM_CLIP_TOKENS = 77


class StableDiffusion3Adapter(PictureAdapter):
    """See `ModelAdapter`."""

    pipeline_class = StableDiffusion3Pipeline
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    parts: ClassVar[Parts] = {
        "transformer": ("transformer",),
        "text_encoder": (
            *("text_encoder", "text_encoder_2", "text_encoder_3"),
            *("tokenizer", "tokenizer_2", "tokenizer_3"),
        ),
        "vae": ("vae",),
    }

    max_sequence_length: int = 256
    """Tokens of T5."""

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        if self.pipeline.text_encoder_3 is None and self.transformer is None:
            raise ValueError("without T5, encode needs the transformer's width: load the component transformer as well")
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            *(prompts, None, None),
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return PromptEmbeds.whole(embeds, {"pooled": pooled})

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        blank = super().blank_prompts(count, NUM_CLIP_TOKENS + self.max_sequence_length)
        width = self.transformer.config.pooled_projection_dim
        return replace(blank, extras={"pooled": blank.embeds.new_zeros(count, width)})

    def _levels(self, num_steps: int) -> None:
        return scheduler_levels(num_steps)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return self._vae.channels, rows * self.pipeline.patch_size, columns * self.pipeline.patch_size

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        assert not prompts.has_padding, "this transformer has no mask"
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            pooled_projections=prompts.extras["pooled"].to(latents.device, self.dtype),
            return_dict=False,
        )[0]
        return output.float()

    def _token_grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of image tokens, no more than the transformer has positions for."""
        multiple = self._vae.scale * self.pipeline.patch_size
        grid = token_grid(size, multiple=multiple)
        if self.transformer is not None and max(grid) > (limit := self.transformer.config.pos_embed_max_size):
            raise ValueError(
                f"this model draws at most {limit * multiple} pixels a side, not {size.height} and {size.width}"
            )
        return grid
