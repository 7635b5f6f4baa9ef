"""Teaches the transformer to paint scenes: flow matching on latents that were computed once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowfleet.models.families.qwen_image_attention import use_joint_attention
from recipes.composition.base.training import Recipe, Report, train
from recipes.tiny.components import round_to_half
from recipes.tiny.training import autocast

NEGATIVE_PROMPT = " "
"""What a caption becomes that is dropped: the negative prompt that jobs guide away from by default."""
TEXT_MULTIPLE = 16
"""Captions are padded to a multiple of it: attention kernels want whole tiles."""
TEXT_BATCH = 2048


@dataclass(frozen=True)
class Pictures:
    """What is learned, on one device. Latents (N, tokens, 64); `caption` (N,) int64 is a row of the other two.

    Embeddings (C + 1, L, W) and mask (C + 1, L) bool, true where a token counts; the last row is `NEGATIVE_PROMPT`.
    Each picture's loss is multiplied by its weight (N,) float32; None counts all alike.
    """

    latents: Tensor
    caption: Tensor
    embeddings: Tensor
    mask: Tensor
    weights: Tensor | None = None


def pictures_of(pipeline: Any, latents: Tensor, captions: Sequence[str], dtype: torch.dtype) -> Pictures:
    """Latents (N, tokens, 64) with what the text encoder says of their captions, both in `dtype`."""
    distinct = {text: row for row, text in enumerate(dict.fromkeys(captions))}
    rows = torch.tensor([distinct[text] for text in captions], device=latents.device)
    embeddings, mask = encode_captions(pipeline, [*distinct, NEGATIVE_PROMPT], dtype)
    return Pictures(latents.to(dtype), rows, embeddings, mask)


@torch.no_grad()
def encode_captions(pipeline: Any, captions: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `pipeline.encode_prompt` gives: embeddings (N, L, W) `dtype`, zero where padded, and mask (N, L) bool.

    L is a multiple of `TEXT_MULTIPLE`. Faster for many short captions: the pipeline takes them apart one by one.
    """
    encoder, drop = pipeline.text_encoder, pipeline.prompt_template_encode_start_idx
    texts = [pipeline.prompt_template_encode.format(caption) for caption in captions]
    ids = pipeline.tokenizer(texts).input_ids
    length = -(-(max(map(len, ids)) - drop) // TEXT_MULTIPLE) * TEXT_MULTIPLE + drop
    padded = np.full((len(ids), length), pipeline.tokenizer.pad_token_id, dtype=np.int64)
    mask = np.zeros((len(ids), length), dtype=bool)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    parts = []
    for start in range(0, len(ids), TEXT_BATCH):
        rows = slice(start, start + TEXT_BATCH)
        counts = torch.from_numpy(mask[rows]).to(encoder.device)
        output = encoder(
            input_ids=torch.from_numpy(padded[rows]).to(encoder.device),
            attention_mask=counts.long(),
            output_hidden_states=True,
            logits_to_keep=1,
        )
        parts.append((output.hidden_states[-1] * counts[..., None])[:, drop:].to(dtype))
    return torch.cat(parts), torch.from_numpy(mask[:, drop:].copy()).to(encoder.device)


@dataclass(frozen=True)
class FlowRecipe(Recipe):
    """See `Recipe`."""

    batch_size: int = 128
    dropped_captions: float = 0.1
    """Share of pictures shown with `NEGATIVE_PROMPT`, so that guidance works."""
    time_shift: float = 0.4
    time_spread: float = 1.2
    """Noise levels are logit-normal (https://arxiv.org/abs/2403.03206) with this mean and standard deviation."""
    average: float = 0.999
    """Decay of the moving average of the weights; lower for fewer than 10,000 steps."""

    @property
    def decay(self) -> float:
        return min(self.average, 1 - 10 / max(20, self.num_steps))


def train_transformer(
    pipeline: Any,
    pictures: Pictures,
    grid: tuple[int, int],
    recipe: FlowRecipe,
    *,
    compiled: bool = False,
    larger: tuple[Pictures, tuple[int, int]] | None = None,
) -> list[Report]:
    """Flow matching: the velocity noise − latents at random noise levels. Returns the reports of `train`.

    grid: rows and columns of tokens. `larger`: pictures of another grid, of which each step also learns, as many tokens
    of both. Training begins with the weights of the pipeline's transformer, which becomes the
    moving average of the weights, at the end rounded to fp16 and frozen.
    """
    average = pipeline.transformer.requires_grad_(False)
    learner = copy.deepcopy(average).train().requires_grad_(True)
    use_joint_attention(learner)
    if compiled:
        learner.compile_repeated_blocks(fullgraph=True, dynamic=None if larger is None else False)
    device = pictures.latents.device
    parts = [(pictures, grid, recipe.batch_size)]
    if larger is not None:
        parts.append((*larger, max(1, recipe.batch_size * math.prod(grid) // math.prod(larger[1]))))
    draws = [_loss(learner, recipe, device, *part) for part in parts]

    def loss() -> Tensor:
        return draws[0]() if len(draws) == 1 else torch.stack([draw() for draw in draws]).mean()

    weights, averages = list(learner.parameters()), list(average.parameters())

    def follow() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - recipe.decay)

    reports = train("transformer", weights, loss, recipe, follow)
    round_to_half(average.eval())
    return reports


def _loss(
    learner: Any,
    recipe: FlowRecipe,
    device: torch.device,
    pictures: Pictures,
    grid: tuple[int, int],
    batch: int,
) -> Callable[[], Tensor]:
    """The mean squared error of a batch that it draws."""
    num, nothing = len(pictures.latents), len(pictures.embeddings) - 1
    frequencies = learner.pos_embed([[(1, *grid)]], max_txt_seq_len=pictures.mask.shape[1], device=device)

    def loss() -> Tensor:
        rows = torch.randint(num, (batch,), device=device)
        clean = pictures.latents.index_select(0, rows).float()
        noise = torch.randn_like(clean)
        dropped = torch.rand(batch, device=device) < recipe.dropped_captions
        caption = pictures.caption.index_select(0, rows).masked_fill(dropped, nothing)
        levels = torch.sigmoid(recipe.time_spread * torch.randn(batch, device=device) + recipe.time_shift)
        predicted = velocity(
            learner,
            torch.lerp(clean, noise, levels[:, None, None]),
            levels,
            pictures.embeddings.index_select(0, caption).float(),
            pictures.mask.index_select(0, caption),
            frequencies,
        )
        errors = (predicted - (noise - clean)).square()
        if pictures.weights is not None:
            errors = errors * pictures.weights.index_select(0, rows)[:, None, None]
        return errors.mean()

    return loss


def velocity(
    transformer: Any, latents: Tensor, levels: Tensor, embeddings: Tensor, mask: Tensor, frequencies: Any
) -> Tensor:
    """The transformer's forward without a copy from the host, which CUDA graphs refuse: (B, tokens, 64) float32.

    latents (B, tokens, 64); noise levels (B,) in 0 … 1; embeddings (B, L, W), mask (B, L) bool; frequencies: rotary
    embeddings of the image and of the text. Noise levels are embedded in float32, whatever the rest computes in.
    """
    embedded = transformer.time_text_embed(levels, latents)
    with autocast(latents.device):
        image = transformer.img_in(latents)
        text = transformer.txt_in(transformer.txt_norm(embeddings))
        for block in transformer.transformer_blocks:
            text, image = block(
                hidden_states=image,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=mask,
                temb=embedded,
                image_rotary_emb=frequencies,
            )
        output: Tensor = transformer.proj_out(transformer.norm_out(image, embedded))
    return output.float()
