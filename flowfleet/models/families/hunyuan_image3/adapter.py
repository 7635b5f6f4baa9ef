"""HunyuanImage-3.0, https://arxiv.org/abs/2509.23951, on the folder that Tencent publishes.

Latents are spatial, (B, 32, H/16, W/16). A prompt's embeddings are the rows of the vocabulary's table for its tokens
(prompts.py); they go through the transformer together with the picture. The negative prompt " ", or any blank one, is
the published guidance: the prompt's own sequence with `<cfg>` in the place of its text. A `rollout.negative_prompt`
with text is a sequence of its own. Guidance is n + s (p − n); published: s = 5, 50 steps, shift 3.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from flowfleet.models.base import ModelAdapter, Schedule, to_pixels, to_uint8, without_images
from flowfleet.models.embeds import PromptEmbeds, pad_embeds
from flowfleet.models.empty import empty_model
from flowfleet.models.families.flat import FlatPipeline
from flowfleet.models.families.hunyuan_image3 import prompts as sequences
from flowfleet.models.families.hunyuan_image3.transformer import HunyuanImage3Transformer, TransformerConfig
from flowfleet.models.families.hunyuan_image3.vae import HunyuanImage3Vae
from flowfleet.models.files import Prefixed, WeightFiles, read_config
from flowfleet.models.loading import ALL_COMPONENTS, Component, LoadFormat, StoredNames, fill_dummy
from flowfleet.models.packing import token_grid
from flowfleet.models.schedules import shifted_schedule
from flowfleet.models.settings import NO_GUIDANCE, Guidance, Size
from flowfleet.models.weight_files import FLAT

_EXPERTS: Final = re.compile(r"(.+\.experts)\.(gate_and_up_proj|down_proj)")
_TEXT: Final = "text"
"""(B, 2) int64: first and last + 1 place of the prompt's own tokens."""
_TOKENS: Final = "tokens"
"""(B, 2 + ratios, D): embeddings of `<cfg>`, of the size and of each ratio."""


class HunyuanNames:
    """A layer's experts are stored one by one."""

    def of(self, name: str, rows: int) -> list[str]:
        match = _EXPERTS.fullmatch(name)
        return [f"{match[1]}.{number}.{match[2]}.weight" for number in range(rows)] if match else [name]


class TokenTable(nn.Module):
    """Embeddings of the vocabulary."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class HunyuanImage3Adapter(ModelAdapter):
    """See `ModelAdapter`. The default LoRA adapts attention and the shared expert, not the experts of the mixture."""

    lora_targets = ("qkv_proj", "o_proj", "shared_mlp.gate_and_up_proj", "shared_mlp.down_proj")
    pipeline_class: ClassVar[Any] = FlatPipeline
    layout = FLAT
    stored: ClassVar[StoredNames | None] = HunyuanNames()

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self._multiple = int(vae_config["ffactor_spatial"])
        self._channels = int(vae_config["latent_channels"])
        self._scaling = float(vae_config.get("scaling_factor") or 1.0)
        self._offset = float(vae_config.get("shift_factor") or 0.0)

    @classmethod
    def _load(
        cls, path: Any, dtype: torch.dtype, device: Any, components: Sequence[Component], load_format: LoadFormat
    ) -> tuple[Any, dict[str, Any]]:
        """See `ModelAdapter.load`. The VAE is float32, as published."""
        config = read_config(path)
        shape, vae_config = TransformerConfig.of(config), dict(config["vae"])
        makers: dict[Component, Any] = {
            "transformer": lambda: HunyuanImage3Transformer(shape),
            "text_encoder": lambda: TokenTable(int(config["vocab_size"]), shape.hidden_size),
            "vae": lambda: HunyuanImage3Vae(vae_config),
        }
        names: dict[Component, StoredNames] = {
            "transformer": HunyuanNames(),
            "text_encoder": Prefixed("model.wte."),
            "vae": Prefixed("vae."),
        }
        files = WeightFiles(Path(path), FLAT) if load_format == "safetensors" and components else None
        made: dict[str, Any] = dict.fromkeys(ALL_COMPONENTS)
        for component in components:
            dtype_of_part = torch.float32 if component == "vae" else dtype
            module = empty_model(makers[component], dtype_of_part)
            if files is not None:
                files.fill(module, names[component], device, dtype_of_part)
            elif load_format == "dummy":
                fill_dummy(module, component, device)
            made[component] = module
        generation = read_config(path, "generation_config.json")
        pipeline = FlatPipeline(**made, shift=float(generation.get("flow_shift", 3.0)), shape=shape)
        if made["text_encoder"] is not None and load_format != "empty":
            pipeline.tokenizer = _tokenizer(path)
            pipeline.template = sequences.Template.of(path, generation)
        pipeline.base_size = int(config.get("image_base_size", 1024))
        return pipeline, vae_config

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        ids, places = zip(*map(self._ids, prompts), strict=True)
        width = max(map(len, ids))
        lengths = torch.tensor([len(row) for row in ids])
        mask = torch.arange(width) < lengths.unsqueeze(1)
        padded = pad_sequence([torch.tensor(row) for row in ids], batch_first=True).to(self.device)
        embeds = self.text_encoder(padded) * mask.unsqueeze(-1).to(self.device)
        special = self.text_encoder(self._special_ids().to(self.device)).expand(len(prompts), -1, -1)
        extras = {_TEXT: torch.tensor(places, device=self.device), _TOKENS: special.contiguous()}
        return PromptEmbeds(embeds, mask.to(self.device), extras)

    def _ids(self, prompt: str) -> tuple[list[int], tuple[int, int]]:
        ids, prompt_slice = self.pipeline.template.ids(self.pipeline.tokenizer, prompt)
        return ids, (prompt_slice.start, prompt_slice.stop)

    def _special_ids(self) -> Tensor:
        tokenizer, base = self.pipeline.tokenizer, self.pipeline.base_size
        known = tokenizer.get_vocab()
        wanted = ["<cfg>", f"<img_size_{base}>"]
        wanted += [f"<img_ratio_{number}>" for number in range(sequences.RATIOS) if f"<img_ratio_{number}>" in known]
        if missing := [token for token in wanted if token not in known]:
            raise ValueError(f"the tokenizer of this HunyuanImage-3.0 lacks {', '.join(missing)}")
        return torch.tensor([known[token] for token in wanted])

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        width = self.pipeline.shape.hidden_size
        embeds = torch.zeros(count, num_tokens, width, dtype=self.dtype, device=self.device)
        special = torch.zeros(count, 2 + sequences.RATIOS, width, dtype=self.dtype, device=self.device)
        places = torch.zeros(count, 2, dtype=torch.int64, device=self.device)
        return PromptEmbeds.whole(embeds, {_TEXT: places, _TOKENS: special})

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """`shifted_schedule`: the published scheduler."""
        self.latent_shape(size)
        return shifted_schedule(num_steps, self.pipeline.shift if shift is None else shift)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        return self._channels, *token_grid(size, multiple=self._multiple)

    def velocity(self, latents: Tensor, timestep: Tensor, prompts: PromptEmbeds, **options: Any) -> Tensor:
        guidance, negative = options.get("guidance", NO_GUIDANCE), options.get("negative")
        if guidance.is_on and negative is not None:
            options["negative"] = unconditional(prompts.rows(len(latents)), negative.rows(len(latents)))
        return super().velocity(latents, timestep, prompts, **options)

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        embeds, mask = self._with_size(prompts, size)
        embeds = embeds.to(latents.device, self.dtype)
        output: Tensor = expert(
            latents=latents,
            timesteps=timesteps,
            embeds=embeds,
            mask=None if mask is None else mask.to(latents.device),
        )
        return output.float()

    def _with_size(self, prompts: PromptEmbeds, size: Size) -> tuple[Tensor, Tensor | None]:
        """Embeddings (B, P + 2, D) with the tokens of size and ratio right behind each prompt, and their mask."""
        special = prompts.extras[_TOKENS]
        ratio = sequences.ratio_token(size, self.pipeline.base_size, special.shape[1] - 2)
        told = special[:, [1, 2 + ratio]].to(prompts.embeds)
        if not prompts.has_padding:
            return torch.cat([prompts.embeds, told], dim=1), None
        places = prompts.mask.sum(1, keepdim=True) + torch.arange(2, device=prompts.mask.device)
        wide = F.pad(prompts.embeds, (0, 0, 0, 2))
        wide = wide.scatter(1, places.unsqueeze(-1).expand(-1, -1, wide.shape[-1]), told)
        return wide, F.pad(prompts.mask, (0, 2)).scatter(1, places, True)

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        return torch.cat([to_uint8(self._pixels(row, size)) for row in torch.split(latents, 1)])

    def checkpoint_decoding(self) -> None:
        self.vae.decoder.checkpoints = True

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        planes = latents.to(self.device, torch.float32) / self._scaling + self._offset
        with self._half():
            pixels: Tensor = self.vae.decode(planes)
        return pixels

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        pixels = to_pixels(frames)[:, :, 0].to(self.device)
        with self._half():
            modes = torch.cat([self.vae.encode(row) for row in torch.split(pixels, 1)]).float()
        return ((modes - self._offset) * self._scaling).cpu()

    def _half(self) -> AbstractContextManager[object]:
        """float16 in the VAE on accelerators, as published."""
        kind = self.device.type
        return nullcontext() if kind in ("cpu", "meta") else torch.autocast(kind, torch.float16)


def _tokenizer(path: str | Path) -> Any:
    """Loads `tokenizer.json`. Raises ValueError where it is not there."""
    tokenizer_class: Any = PreTrainedTokenizerFast
    try:
        return tokenizer_class.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {path} has no readable tokenizer: {error}") from error


def unconditional(prompts: PromptEmbeds, negative: PromptEmbeds) -> PromptEmbeds:
    """The negative prompts (B rows) where they have text, and the prompts' own sequences with `<cfg>` in the place of
    every token of their text where they have none."""
    places = torch.arange(prompts.embeds.shape[1], device=prompts.embeds.device)
    text = prompts.extras[_TEXT].to(places.device)
    is_prompt = (places >= text[:, :1]) & (places < text[:, 1:])
    cfg = prompts.extras[_TOKENS][:, :1].to(prompts.embeds)
    dropped = PromptEmbeds(
        torch.where(is_prompt.unsqueeze(-1), cfg, prompts.embeds), prompts.mask, prompts.extras, prompts.has_padding
    )
    blank = negative.extras[_TEXT][:, 0] == negative.extras[_TEXT][:, 1]
    if blank.all():
        return dropped
    if not blank.any():
        return negative
    width = max(len(places), negative.embeds.shape[1])
    dropped, negative = pad_embeds(dropped, width), pad_embeds(negative, width)
    embeds = torch.where(blank.to(places.device)[:, None, None], dropped.embeds, negative.embeds.to(places.device))
    mask = torch.where(blank.to(places.device)[:, None], dropped.mask, negative.mask.to(places.device))
    return PromptEmbeds(embeds, mask, prompts.extras)
