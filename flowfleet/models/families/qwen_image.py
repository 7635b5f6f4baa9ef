"""Qwen-Image, https://arxiv.org/abs/2508.02324, on the components of diffusers' `QwenImagePipeline`.

Latents travel packed, as the transformer takes them: (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.base import without_images
from flowfleet.models.embeds import PromptEmbeds, pad_to_multiple
from flowfleet.models.families.qwen_image_attention import use_joint_attention
from flowfleet.models.families.qwen_image_block import use_fused_blocks
from flowfleet.models.level_tables import LevelLayers, LevelTable, table_of
from flowfleet.models.qwen_vae import QwenVaeAdapter
from flowfleet.models.settings import Guidance, Size


class QwenImageAdapter(QwenVaeAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = QwenImagePipeline
    cuts_padding = True
    level_layers: ClassVar[LevelLayers | None] = LevelLayers(
        "time_text_embed", re.compile(r"transformer_blocks\.\d+\.(img|txt)_mod\.1|norm_out\.linear")
    )
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        for expert in self.experts.values():
            use_joint_attention(expert)
            use_fused_blocks(expert)

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, mask = self.pipeline.encode_prompt(prompts, device=self.device)
        if mask is None:  # diffusers' way to say that nothing is padded
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return PromptEmbeds(embeds, mask.bool())

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        return self._transform(expert, latents, timesteps, prompts, [self._token_grid(size)])

    def _transform(
        self, expert: Any, tokens: Tensor, timesteps: Tensor, prompts: PromptEmbeds, grids: Sequence[tuple[int, int]]
    ) -> Tensor:
        """The transformer's output (B, T, 4Z) float32 for tokens (B, T, 4Z) of pictures with these rows and columns."""
        prompts = pad_to_multiple(prompts, self.token_multiple)
        special: dict[str, Any] = {}
        if prompts.half_widths is not None:
            special["attention_kwargs"] = {"half_widths": prompts.half_widths}
        if (table := table_of(expert)) is not None:
            special["additional_t_cond"] = self._rows(expert, table, len(tokens))
        output: Tensor = expert(
            hidden_states=tokens.to(self.dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=prompts.embeds.to(tokens.device, self.dtype),
            encoder_hidden_states_mask=prompts.mask.to(tokens.device) if prompts.has_padding else None,
            img_shapes=[[(1, *grid) for grid in grids]] * len(tokens),
            return_dict=False,
            **special,
        )[0]
        return output.float()

    def _rows(self, expert: Any, table: LevelTable, count: int) -> Tensor:
        """The table's rows of `count` samples, or of one for all of them; twice where condition images have a level of
        their own, which is 0."""
        rows = table.rows(self.levels)
        if len(rows) > 1:
            rows = rows.repeat(count // len(rows), 1, 1)
        if not expert.zero_cond_t:
            return rows
        return torch.cat([part.expand(count, *part.shape[1:]) for part in (rows, table.rows(torch.zeros(())))])

    def _guide(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        return guide(positive, negative, guidance.scale)


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance (B, T, C): n + scale (p - n), each token rescaled to the norm of p."""
    combined = negative + scale * (positive - negative)
    norm = combined.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(combined.dtype).tiny)
    rescaled: Tensor = combined * (positive.norm(dim=-1, keepdim=True) / norm)
    return rescaled
