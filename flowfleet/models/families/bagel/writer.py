"""BAGEL as a model that writes text: answers to questions with pictures, by its understanding expert.

A question is its pictures, one after the other, then the text between <|im_start|> and <|im_end|>; what is written
follows a second <|im_start|>. All tokens of a picture have one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

from flowfleet.models.families.bagel.checkpoint import load_transformer, read_config
from flowfleet.models.families.bagel.tokens import SpecialTokens
from flowfleet.models.families.bagel.transformer import Bagel, BagelConfig
from flowfleet.models.loading import LoadFormat
from flowfleet.models.sequences.adapter import MODEL, MediaAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt, PromptMedia
from flowfleet.models.weight_files import BAGEL

_PATCHES: Final = "patches"
_PLACES: Final = "patch_places"
_PICTURES: Final = "picture_tokens"
"""Tokens of each picture, those around it included."""
_VAE_PIXELS: Final = 8
"""Pixels that a latent pixel is wide and high."""


class BagelQuestions:
    """Turns questions into token ids and patches."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, config: BagelConfig) -> None:
        self.tokenizer = tokenizer
        self._special, self._config = special, config

    @classmethod
    def load(cls, path: str | Path) -> BagelQuestions:
        """Reads a checkpoint's tokenizer and configurations. Raises OSError or ValueError where one is missing."""
        tokenizer = Qwen2Tokenizer.from_pretrained(str(path), local_files_only=True)
        return cls(tokenizer, SpecialTokens.of(path), read_config(path))

    def encode(self, prompt: str, media: Sequence[PromptMedia]) -> EncodedPrompt:
        """Raises ValueError for media that are not pictures, and for a text with tokens of its own for patches."""
        if any(medium.kind != "picture" for medium in media):
            raise ValueError("BAGEL looks at pictures alone: leave sounds and films out of the prompts")
        special, ids = self._special, list[int]()
        text = special.wrapped(self.tokenizer, prompt)
        if special.patch in text:
            raise ValueError("prompts must not contain <|image_pad|>: pictures are put in by the model")
        looked = [self._patches(medium.content) for medium in media]
        for patches, _ in looked:
            ids += [special.picture[0], *[special.patch] * len(patches), special.picture[1]]
        token_ids = torch.tensor([*ids, *text, special.start], dtype=torch.int64)
        if not looked:
            return EncodedPrompt(token_ids)
        return EncodedPrompt(
            token_ids,
            {
                _PATCHES: torch.cat([patches for patches, _ in looked]),
                _PLACES: torch.cat([places for _, places in looked]),
                _PICTURES: torch.tensor([len(patches) + 2 for patches, _ in looked]),
            },
        )

    def _patches(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        """(n, 3 p²) float32 from -1 to 1, a patch row by row with its colors last, and (n,) int64 places.

        A picture is resized twice, as the authors do: as for painting it, then for the encoder.
        """
        config, patch = self._config, self._config.vit_patch
        stride = config.latent_patch * _VAE_PIXELS
        picture = Image.fromarray(pixels).convert("RGB")
        most = config.latent_side * stride
        picture = _resized(picture, most, most // 2, stride)
        most = config.vit_side * patch
        picture = _resized(picture, most, round(most * 8 / 35), patch)  # 224 of the published 980
        values = torch.from_numpy(np.asarray(picture).copy()).float() / 127.5 - 1
        rows, columns = len(values) // patch, values.shape[1] // patch
        patches = values.reshape(rows, patch, columns, patch, 3).transpose(1, 2).reshape(rows * columns, -1)
        places = torch.arange(rows)[:, None] * config.vit_side + torch.arange(columns)
        return patches, places.flatten()


def _resized(picture: Image.Image, most: int, least: int, stride: int) -> Image.Image:
    """At most `most` pixels on the long side, at least `least` on the short one where that lets it, both multiples of
    `stride`."""
    scale = max(min(most / max(picture.size), 1.0), least / min(picture.size))
    width, height = (max(stride, round(round(side * scale) / stride) * stride) for side in picture.size)
    size = min(width, most), min(height, most)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


class BagelWriter(MediaAdapter):
    """See the module. The default adapter leaves the encoder of pictures as it is."""

    model_class: ClassVar[Any] = Bagel
    layout = BAGEL

    def __init__(self, model: Any, processor: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, processor, dtype=dtype, device=device)
        if model is not None:
            model.lora_excluded = r"vit_model\..*"

    @classmethod
    def load_config(cls, path: str | Path) -> BagelConfig:
        return read_config(path)

    @classmethod
    def load_processor(cls, path: str | Path) -> BagelQuestions:
        return BagelQuestions.load(path)

    @classmethod
    def _load_model(cls, path: str | Path, dtype: torch.dtype, device: Any, load_format: LoadFormat) -> nn.Module:
        model = load_transformer(path, dtype, device, load_format, MODEL)
        model.special_tokens = SpecialTokens.of(path)  # type: ignore[assignment]
        return model

    @property
    def _special(self) -> SpecialTokens:
        special: SpecialTokens = self.transformer.special_tokens
        return special

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset([self._special.end])

    @property
    def undrawn_ids(self) -> frozenset[int]:
        """A written one would have no picture."""
        return frozenset((self._special.patch, *self._special.picture))

    def model_inputs(self, sequences: Sequence[Tokens]) -> dict[str, Any]:
        inputs: dict[str, Any] = super().model_inputs(sequences)
        pictures = [self._pictures(item.prompt) for item in sequences]
        positions = [_positions(sizes, item.num_inputs) for sizes, item in zip(pictures, sequences, strict=True)]
        inputs["position_ids"] = torch.cat(positions)[None].to(self.device)
        inputs |= {"lengths": [item.num_inputs for item in sequences], "pictures": pictures}
        looked = [item.prompt.inputs for item in sequences if item.prompt.inputs]
        if looked:
            inputs |= {
                _PATCHES: torch.cat([part[_PATCHES] for part in looked]).to(self.device, self.dtype),
                _PLACES: torch.cat([part[_PLACES] for part in looked]).to(self.device),
                "patch_tokens": _patch_tokens(pictures, inputs["lengths"]).to(self.device),
            }
        return inputs

    def hidden_states(self, model: Any, inputs: Any) -> Tensor:
        hidden: Tensor = model.write(**inputs)
        return hidden

    def _pictures(self, prompt: EncodedPrompt) -> list[int]:
        counts: list[int] = prompt.inputs[_PICTURES].tolist() if prompt.inputs else []
        return counts


def _patch_tokens(pictures: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """(n,) int64: where in a packed row the patches are."""
    token_ranges, start = [], 0
    for sizes, length in zip(pictures, lengths, strict=True):
        first = start
        for size in sizes:
            token_ranges.append(torch.arange(first + 1, first + size - 1))
            first += size
        start += length
    return torch.cat(token_ranges)


def _positions(pictures: Sequence[int], count: int) -> Tensor:
    """(count,) int64: one for each picture, then one for each token."""
    shown = [torch.full((size,), number) for number, size in enumerate(pictures)]
    text = torch.arange(count - sum(pictures)) + len(pictures)
    return torch.cat([*shown, text])
