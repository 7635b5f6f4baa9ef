"""Krea 2 on the components of diffusers' `Krea2Pipeline`, with Qwen-Image's VAE and packed latents.

A prompt is up to 512 tokens of Qwen3-VL, several layers of each side by side, cut to its own length. The pipeline pads
between prompt and template; here the padding comes last, which is the same, because text has no positions.

Our guidance scale s means n + s (p - n), as everywhere. The pipeline's `guidance_scale` g means p + g (p - n), the same
for s = g + 1.
"""

from typing import Any, ClassVar

import torch
from diffusers import Krea2Pipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.qwen_vae import QwenVaeAdapter
from flowfleet.models.settings import Guidance, Size

DISTILLED_MU = 1.15
"""The pipeline's shift of a distilled checkpoint, at every size."""


class Krea2Adapter(QwenVaeAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = Krea2Pipeline
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_gate", "attn.to_out.0"),
        *("ff.gate", "ff.up", "ff.down"),
    )
    max_sequence_length: int = 512
    """Tokens of Qwen3-VL."""

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._mu = DISTILLED_MU if pipeline.config.is_distilled else None

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        states, mask = self.pipeline.encode_prompt(
            prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        embeds = torch.where(mask[..., None], states.flatten(2), 0).gather(
            1, order[..., None].expand(-1, -1, states[0, 0].numel())
        )
        return PromptEmbeds(embeds, mask.gather(1, order)).trimmed()

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        config, length = self.transformer.config, min(num_tokens, self.max_sequence_length)
        width = config.num_text_layers * config.text_hidden_dim
        return PromptEmbeds.whole(torch.zeros(count, length, width, dtype=self.dtype, device=self.device))

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        layers = self.transformer.config.num_text_layers
        count, num_tokens = prompts.embeds.shape[:2]
        output: Tensor = expert(
            hidden_states=latents.to(self.dtype),
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype).reshape(count, num_tokens, layers, -1),
            timestep=timesteps / 1000,
            position_ids=self.pipeline.prepare_position_ids(num_tokens, *self._token_grid(size), latents.device),
            encoder_attention_mask=prompts.mask.to(latents.device) if prompts.has_padding else None,
            return_dict=False,
        )[0]
        return output.float()
