"""FLUX.2 [klein], https://github.com/black-forest-labs/flux2, on the components of diffusers' `Flux2KleinPipeline`.

Latents travel packed, as the transformer takes them: (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels, each
channel normalized by the statistics in the VAE. A prompt is 512 tokens of three layers of Qwen3, all of which the
transformer attends to, padding included. Condition images follow the sample's tokens, each at a time of its own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import seeded_noise
from flowfleet.models.conditions import ConditionedAdapter, conditions_of, too_narrow
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.packing import PATCH, pack, unpack
from flowfleet.models.settings import Guidance, Size

MULTIPLE = 16
"""Pixels that a token is wide and high."""
TIME_OF_CONDITIONS = 10
"""The i-th condition image stands at i times this on the rotary embedding's time axis, and the sample at 0."""


class Flux2KleinAdapter(PictureAdapter, ConditionedAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = Flux2KleinPipeline
    vae_class: ClassVar[Any] = AutoencoderKLFlux2
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
    )
    max_images = 8
    max_sequence_length: int = 512
    """Tokens of Qwen3."""

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self.takes_guidance = not pipeline.config.is_distilled

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        rows = self._rows_of_images(prompts, images)
        embeds, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return self._with_conditions(PromptEmbeds.whole(embeds), rows)

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        """Blank prompts, each with one square image if the job sets the area of condition images."""
        blank = super().blank_prompts(count, self.max_sequence_length)
        return blank if self.condition_pixels is None else self._blank_conditions(blank, MULTIPLE)

    def _resize(self, picture: Image.Image) -> Image.Image:
        """Shrinks what is larger than the area; then crops to whole tokens."""
        processor, pixels = self.pipeline.image_processor, self._pixels_wanted()
        shrunk: Image.Image = processor._resize_if_exceeds_area(picture, pixels)
        width, height = (side // MULTIPLE * MULTIPLE for side in shrunk.size)
        if not (width and height):
            raise too_narrow(picture, pixels)
        cropped: Image.Image = processor._resize_and_crop(shrunk, width, height)
        return cropped

    def _mu(self, num_steps: int, num_tokens: int) -> float:
        """The pipeline's fit: linear in the tokens, with a line for 10 steps and one for 200, linear between them."""
        at_10, at_200 = 8.73809524e-05 * num_tokens + 1.89833333, 0.00016927 * num_tokens + 0.45666666
        if num_tokens > 4300:
            return at_200
        slope = (at_200 - at_10) / 190.0
        return slope * num_steps + (at_200 - 200.0 * slope)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, self._vae.channels * PATCH**2

    def shared_tokens(self, size: Size) -> tuple[int, ...]:
        return *super().shared_tokens(size), self.max_sequence_length

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        num_tokens, channels = self.latent_shape(size)
        return seeded_noise(seeds, (channels, num_tokens)).transpose(1, 2).contiguous()

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        assert not prompts.has_padding, "this transformer has no mask"
        conditions = conditions_of(prompts, latents.device)
        tokens = torch.cat([latents, *(condition.flatten(1, 2) for condition in conditions)], dim=1)
        if tokens.shape[1] % self.token_multiple:
            raise ValueError(
                f"{self.token_multiple} devices cannot share the {tokens.shape[1]} tokens of a sample and its images "
                "evenly: choose another size of either, or have each device take whole samples"
            )
        positions = [position_ids(0, *self._token_grid(size))]
        for number, condition in enumerate(conditions, start=1):
            positions.append(position_ids(TIME_OF_CONDITIONS * number, *condition.shape[1:3]))
        output: Tensor = expert(
            hidden_states=tokens.to(self.dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            txt_ids=position_ids(0, 1, 1, prompts.embeds.shape[1]).to(latents.device)[None],
            img_ids=torch.cat(positions).to(latents.device)[None],
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]].float()

    def _planes(self, latents: Tensor, size: Size) -> Tensor:
        mean, std = self._statistics()
        return unpack(latents.to(mean.device, torch.float32) * std + mean, *self._token_grid(size))

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        mean, std = self._statistics()
        return (pack(self._vae.encode(frames)) - mean.cpu()) / std.cpu()

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel of a token, float32."""
        norm = self.vae.bn
        return norm.running_mean.float(), (norm.running_var.float() + self.vae_config["batch_norm_eps"]).sqrt()


def position_ids(time: int, rows: int, columns: int, tokens: int = 1) -> Tensor:
    """(rows * columns * tokens, 4) float32: time, row, column and place in the text, for the rotary embedding."""
    axes = (torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.arange(tokens))
    return torch.cartesian_prod(*axes).float()
