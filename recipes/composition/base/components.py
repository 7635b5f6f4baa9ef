"""The five parts of the composition models' checkpoints, each of its real class; what is trained is untrained yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import nn

from recipes.tiny.components import (
    LATENT_CHANNELS,
    TEMPLATE_WORDS,
    build_scheduler,
    build_text_encoder,
    build_vae,
    train_tokenizer,
)

MAX_VOCABULARY = 16_000


@dataclass(frozen=True)
class ModelSize:
    """Widths and depths. Channels per head are `sum(rope_axes)`: those of the frame, of the row and of the column."""

    num_blocks: int
    num_heads: int
    rope_axes: tuple[int, int, int]
    text_width: int
    vae_width: int


SMALL = ModelSize(num_blocks=6, num_heads=4, rope_axes=(8, 12, 12), text_width=128, vae_width=16)
"""3.7 M parameters in the transformer, 2.6 M in the autoencoder: a checkpoint that fits a repository."""
FULL = ModelSize(num_blocks=8, num_heads=6, rope_axes=(16, 24, 24), text_width=256, vae_width=32)
"""43 M parameters in the transformer, 10 M in the autoencoder."""


def build_pipeline(size: ModelSize, words: Sequence[str]) -> Any:
    """A `QwenImagePipeline` whose transformer and autoencoder are untrained and whose other parts are final.

    Each of `words` is one token. Draws from torch's global generator.
    """
    tokenizer = build_tokenizer(words)
    return QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=build_vae(size.vae_width),
        text_encoder=build_text_encoder(tokenizer, size.text_width),
        tokenizer=tokenizer,
        transformer=build_transformer(size),
    )


def build_tokenizer(words: Sequence[str]) -> Any:
    """A byte-level BPE with the real special tokens; template and `words` are one token each, all else is bytes."""
    texts = [TEMPLATE_WORDS, " " + " ".join(words), "\n".join(words)]  # within a caption, and as its first word
    return train_tokenizer(texts, vocab_size=MAX_VOCABULARY)


def build_transformer(size: ModelSize) -> Any:
    """An untrained transformer that begins as DiT does (https://arxiv.org/abs/2212.09748): its blocks change nothing.

    Xavier's uniform weights, biases of zero, and zeros where streams are modulated, gated and given out.
    """
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=size.num_blocks,
        attention_head_dim=sum(size.rope_axes),
        num_attention_heads=size.num_heads,
        joint_attention_dim=size.text_width,
        axes_dims_rope=size.rope_axes,
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    ends = [block.img_mod[1] for block in transformer.transformer_blocks]
    ends += [block.txt_mod[1] for block in transformer.transformer_blocks]
    for linear in (*ends, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
    return transformer


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
