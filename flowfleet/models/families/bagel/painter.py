"""BAGEL as a flow: pictures from text.

Latents travel packed, (B, T, 4Z) with T = (H/16)(W/16) tokens of 2x2 latent pixels, the channels of a pixel together.
The transformer reads the prompt itself, so prompt embeddings are its token ids, exact in float32: (B, L, 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer

from flowfleet.models.base import Schedule, without_images
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.families.bagel.checkpoint import load_transformer, load_vae, read_config, vae_config
from flowfleet.models.families.bagel.tokens import SpecialTokens
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.loading import Component, LoadFormat
from flowfleet.models.packing import token_grid
from flowfleet.models.schedules import shifted_schedule
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.weight_files import BAGEL

SHIFT: Final = 3.0
"""Shift of the noise levels, as the authors sample. `timestep_shift` in the configuration belongs to their training."""


@dataclass
class BagelPipeline:
    """The components of a checkpoint; those that were not loaded are None."""

    transformer: Any = None
    tokenizer: Any = None
    vae: AutoencoderKL | None = None


class BagelPainter(PictureAdapter):
    """See the module. A prompt of white space alone has no tokens: the branch without text of guidance."""

    pipeline_class: ClassVar[Any] = BagelPipeline
    layout = BAGEL
    parts = {"transformer": ("transformer",), "text_encoder": ("tokenizer",), "vae": ("vae",)}  # noqa: RUF012
    lora_targets = (
        *("q_proj_moe_gen", "k_proj_moe_gen", "v_proj_moe_gen", "o_proj_moe_gen"),
        *("mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj", "mlp_moe_gen.down_proj"),
    )

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        """`vae_config` holds the VAE's settings, and under `path` the checkpoint's folder."""
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._config = read_config(vae_config["path"])
        self._tokens = SpecialTokens.of(vae_config["path"])

    @classmethod
    def _load(
        cls, path: Any, dtype: torch.dtype, device: Any, components: Sequence[Component], load_format: LoadFormat
    ) -> tuple[Any, dict[str, Any]]:
        try:
            pipeline = BagelPipeline(
                load_transformer(path, dtype, device, load_format, "transformer")
                if "transformer" in components
                else None,
                Qwen2Tokenizer.from_pretrained(str(path), local_files_only=True)
                if "text_encoder" in components
                else None,
                load_vae(path, dtype, device, load_format) if "vae" in components else None,
            )
            return pipeline, vae_config(path) | {"path": str(path)}
        except (OSError, ValueError) as error:
            raise ValueError(f"model {path} cannot be loaded as a BagelPipeline: {error}") from error

    @property
    def text_encoder(self) -> Any:
        """The tokenizer: the transformer encodes."""
        return self.pipeline.tokenizer

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        return concat_embeds([self._row(prompt) for prompt in prompts])

    def _row(self, prompt: str) -> PromptEmbeds:
        """Encodes a prompt. The row is at least one token wide, so that an empty prompt is padding alone."""
        token_ids = self._tokens.wrapped(self.pipeline.tokenizer, prompt) if prompt.strip() else []
        embeds = torch.tensor(token_ids or [0], dtype=torch.float32, device=self.device)[None, :, None]
        mask = torch.full(embeds.shape[:2], bool(token_ids), device=self.device)
        return PromptEmbeds(embeds, mask, has_padding=not token_ids)

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        return PromptEmbeds.whole(torch.zeros(count, num_tokens, 1, device=self.device))

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """num_steps + 1 even levels from 1 to 0, shifted. The authors count the levels: their 15 are 14 steps."""
        self._token_grid(size)
        return shifted_schedule(num_steps, SHIFT if shift is None else shift)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, self._config.token_width

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        rows, columns = self._token_grid(size)
        places = torch.arange(rows)[:, None] * self._config.latent_side + torch.arange(columns)
        output: Tensor = expert(
            latents.to(self.dtype),
            sigma=timesteps / 1000,
            token_ids=prompts.embeds[..., 0].to(latents.device, torch.int64),
            mask=prompts.mask.to(latents.device) if prompts.has_padding else None,
            markers=torch.tensor(self._tokens.picture, device=latents.device),
            places=places.flatten().to(latents.device),
        )
        return output.float()

    def _guide(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        return guide(positive, negative, guidance)

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        planes = self._vae.encode(frames)
        patch = self._config.latent_patch
        count, channels, rows, columns = planes.shape
        parts = planes.reshape(count, channels, rows // patch, patch, columns // patch, patch)
        return parts.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2).contiguous()

    def _planes(self, latents: Tensor, size: Size) -> Tensor:
        """(B, T, 4Z) to planes (B, Z, H/8, W/8)."""
        rows, columns = self._token_grid(size)
        patch = self._config.latent_patch
        parts = latents.reshape(len(latents), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
        return parts.flatten(4).flatten(2, 3)

    def _token_grid(self, size: Size) -> tuple[int, int]:
        multiple = self._vae.scale * self._config.latent_patch
        rows, columns = token_grid(size, multiple=multiple)
        if max(rows, columns) > self._config.latent_side:
            raise ValueError(
                f"height and width must be at most {self._config.latent_side * multiple} pixels in this checkpoint, "
                f"but are {size.height} and {size.width}"
            )
        return rows, columns


def guide(positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
    """The authors' guidance (B, T, C) with the branches of text s_t and of images s_i, for pictures from text alone.

    There the branch without condition images is the positive one, so that no third forward is needed. What guidance
    adds to the norm is taken away again: of the whole sample (`global`, the default), or of each token after both
    branches (`channel`) or after the text's (`text_channel`). No row depends on another.
    """
    renorm = guidance.renorm or "global"
    guided = negative + guidance.scale * (positive - negative)
    if renorm == "text_channel":
        guided = guided * _shrink(positive, guided, (-1,))
    guided = positive + guidance.image_scale * (guided - positive)
    if renorm in ("global", "channel"):
        guided = guided * _shrink(positive, guided, (-1,) if renorm == "channel" else (1, 2))
    return guided


def _shrink(positive: Tensor, guided: Tensor, over: tuple[int, ...]) -> Tensor:
    norms = [torch.linalg.vector_norm(x, dim=over, keepdim=True) for x in (positive, guided)]
    factor: Tensor = (norms[0] / (norms[1] + 1e-8)).clamp(max=1.0)
    return factor
