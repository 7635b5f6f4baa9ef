"""Qwen-Image-2.1, text to picture, on the components of diffusers' `QwenImage21Pipeline`.

Latents are tokens as they are, (B, T, Z) with T = (H/16)(W/16). The transformer is one stream: a prompt's own length of
Qwen3-VL's last layer, each token attending to those before it, then the picture, which attends to everything. The VAE
has a fourth channel, opacity: pictures are shown on white.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Self

import diffusers
import torch
from diffusers import AutoencoderKLQwenImage21
from diffusers.models.attention_dispatch import dispatch_attention_fn
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from flowfleet.models.base import ModelAdapter, Schedule, seeded_noise, to_pixels, to_uint8, without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import CHUNK_PIXELS
from flowfleet.models.loading import USUAL_PARTS, Parts
from flowfleet.models.packing import PATCH, token_grid
from flowfleet.models.schedules import even_levels, flow_match_schedule
from flowfleet.models.settings import Guidance, Size


class TextProcessor:
    """The pipeline's processor without pictures; transformers' own cannot be made without torchvision. None as the
    tokenizer serves a pipeline that encodes nothing."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or self
        self.encode: Callable[[str], list[int]] = lambda text: [0]

    def __call__(self, **arguments: Any) -> Any:
        return self.tokenizer(**arguments)

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> list[list[int]]:
        (message,) = messages
        text = f"<|im_start|>{message['role']}\n{message['content'][0]['text']}<|im_end|>\n"
        return [self.tokenizer.encode(text)]


class QwenImage21Pipeline(diffusers.QwenImage21Pipeline):  # type: ignore[misc]
    """diffusers' class, which can be made without a processor here."""

    def __init__(
        self, scheduler: Any, vae: Any, text_encoder: Any, processor: Any, transformer: Any, sample_sigmas: Any = None
    ) -> None:
        super().__init__(scheduler, vae, text_encoder, processor or TextProcessor(), transformer, sample_sigmas)


class QwenImage21Adapter(ModelAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = QwenImage21Pipeline
    vae_class: ClassVar[Any] = AutoencoderKLQwenImage21
    text_width = "context_in_dim"
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
    )
    parts: ClassVar[Parts] = {**USUAL_PARTS, "text_encoder": ("text_encoder", "processor")}
    own_parts = ("processor",)

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._latents_mean = torch.tensor(vae_config["latents_mean"])
        self._latents_std = torch.tensor(vae_config["latents_std"])
        experts: Iterable[Any] = self.experts.values()
        for expert in experts:
            expert.forward = MethodType(_forward, expert)
            for block in expert.transformer_blocks:
                block.attn.set_processor(TextThenImage())

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Self:
        adapter = super().load(path, **options)
        if adapter.text_encoder is not None:
            tokenizer = AutoTokenizer.from_pretrained(str(path), subfolder="processor", local_files_only=True)
            adapter.pipeline.processor = TextProcessor(tokenizer)
            adapter.complete(adapter.pipeline)
        return adapter

    def complete(self, pipeline: Any) -> None:
        super().complete(pipeline)
        message = {"role": "system", "content": [{"text": pipeline.sys_prompt}]}
        pipeline._drop_idx = len(pipeline.processor.apply_chat_template([message])[0])

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        embeds, mask, _ = self.pipeline.encode_prompt(prompts, device=self.device)
        if mask is None:  # diffusers' way to say that nothing is padded
            return PromptEmbeds.whole(embeds)
        return PromptEmbeds(embeds, mask.bool())

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        config, (rows, columns) = self.pipeline.scheduler.config, self._token_grid(size)
        return flow_match_schedule(config, num_steps, rows * columns, shift=shift, levels=self._levels)

    def _levels(self, num_steps: int) -> ArrayLike:
        """The checkpoint's own levels, if it has as many; else even ones."""
        own: list[float] | None = self.pipeline.config.sample_sigmas
        return own if own is not None and len(own) == num_steps else even_levels(num_steps)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return rows * columns, len(self._latents_mean)

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        num_tokens, channels = self.latent_shape(size)
        return seeded_noise(seeds, (channels, num_tokens)).transpose(1, 2).contiguous()

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        output: Tensor = expert(
            latents.to(self.dtype),
            prompts.embeds.to(latents.device, self.dtype),
            timesteps / 1000,
            self._token_grid(size),
            prompts.mask.to(latents.device) if prompts.has_padding else None,
        )
        return output.float()

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        chunk = max(1, CHUNK_PIXELS // (size.height * size.width))
        return torch.cat([to_uint8(self._pixels(part, size)) for part in torch.split(latents, chunk)])

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        tokens = latents.to(self.device, torch.float32)
        tokens = tokens * self._latents_std.to(self.device) + self._latents_mean.to(self.device)
        planes = tokens.transpose(1, 2).reshape(len(tokens), tokens.shape[2], 1, *self._token_grid(size))
        decoded: Tensor = self.vae.decode(planes.to(self.vae.dtype), return_dict=False)[0][:, :, 0]
        if decoded.shape[1] == 3:
            return decoded
        opacity = (decoded[:, 3:] + 1) / 2
        return decoded[:, :3] * opacity + (1 - opacity)

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        pixels = to_pixels(frames).to(self.device, self.vae.dtype)
        if self.vae_config["in_channels"] > pixels.shape[1]:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
        tokens: Tensor = self.vae.encode(pixels).latent_dist.mode().float().flatten(2).transpose(1, 2).cpu()
        return (tokens - self._latents_mean) / self._latents_std

    def _token_grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tokens. The model wants even numbers of both."""
        scale = int(self.vae_config["scale_factor_spatial"])
        rows, columns = token_grid(size, multiple=scale * PATCH)
        return rows * PATCH, columns * PATCH


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    grid: tuple[int, int],
    text_mask: Tensor | None = None,
) -> Tensor:
    """The transformer's forward of a text and then one picture, (B, T, Z). diffusers' own asks the device where the
    picture is, many times a forward, and has no answer on the meta device. In a batch it also puts all pictures after
    the longest text; here each comes after its own, as alone, so that rows do not depend on their batch.

    Args:
        self: the transformer.
        hidden_states: (B, T, Z).
        encoder_hidden_states: (B, L, D).
        timestep: (B,) from 0 to 1.
        grid: rows and columns of the picture.
        text_mask: (B, L), False where padded; None: nothing is.
    """
    num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
    device, dtype = hidden_states.device, hidden_states.dtype
    joint = torch.cat([self.txt_in(encoder_hidden_states), self.img_in(hidden_states)], dim=1)
    lengths = torch.full(timestep.shape, num_text, device=device) if text_mask is None else text_mask.sum(1)
    timestep, rows = timestep.to(dtype), None
    if self.config.causal_condition:  # the last row is what modulates text
        timestep = torch.cat([timestep, timestep.new_zeros(1)])
        rows = torch.arange(num_text + num_image, device=device) >= num_text
    embedded = self.time_text_embed(timestep, joint)
    modulation = self.modulation(embedded)
    valid = None
    if text_mask is not None:
        valid = torch.cat([text_mask, text_mask.new_ones(len(text_mask), num_image)], dim=1)
    rotary = _rotary(self.pos_embed, lengths, num_text, grid)
    for block in self.transformer_blocks:
        joint = block(
            hidden_states=joint,
            modulation=modulation,
            rotary_emb=rotary,
            target_token_mask=rows,
            segments=[(0, num_text, True)],
            key_valid=valid,
        )
    output: Tensor = self.proj_out(self.norm_out(joint, embedded, rows))
    return output[:, num_text:]


def _rotary(table: Any, lengths: Tensor, num_text: int, grid: tuple[int, int]) -> Tensor:
    """(B, S, D / 2) complex: a text's tokens stand at their place on all three axes; a picture's at the end of its text
    on the first, and at their distance from its middle on the others."""
    device, num_image = lengths.device, grid[0] * grid[1]
    table.freqs = [angles.to(device) for angles in table.freqs]
    text = torch.arange(num_text, device=device)
    middle = (torch.arange(side, device=device) - (side - side // 2) for side in grid)
    sides = torch.cartesian_prod(*middle).T
    first = torch.cat([text.expand(len(lengths), -1), lengths[:, None].expand(-1, num_image)], dim=1)
    others = [torch.cat([text, side]).expand(len(lengths), -1) for side in sides]
    return torch.cat([angles[place] for angles, place in zip(table.freqs, (first, *others), strict=True)], dim=-1)


class TextThenImage:
    """In place of diffusers' processor: a text's tokens attend to those before them, and a picture's to everything."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        *,
        rotary_emb: Tensor,
        segments: Sequence[tuple[int, int, bool]],
        key_valid: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        num_text = segments[0][1]
        width = attn.inner_dim // attn.heads
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, width)) for part in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (
            _turned(norm(x).to(value.dtype), rotary_emb) for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
        )
        texts = (part[:, :num_text] for part in (query, key, value))
        mask = None if key_valid is None else key_valid[:, None, None, :]
        attended = [
            dispatch_attention_fn(*texts, is_causal=True),  # padding comes last, so that what counts never sees it
            dispatch_attention_fn(query[:, num_text:], key, value, attn_mask=mask),
        ]
        output = torch.cat(attended, dim=1).flatten(2, 3).type_as(query)
        for layer in attn.to_out:
            output = layer(output)
        return output


def _turned(x: Tensor, rotary: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotary[:, :, None]).flatten(3).type_as(x)
