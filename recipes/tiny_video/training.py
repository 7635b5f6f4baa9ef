"""Supervised training of the tiny video model, as that of the tiny picture model."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes.tiny.training import LATENT_BATCH, Loss, encode, train_average, train_vae
from recipes.tiny_video.components import MAX_TOKENS

EMBEDDING_BATCH = 64


def train_film_vae(vae: Any, films: Tensor, seconds: float, batch_size: int) -> None:
    """Teach the autoencoder `films`, (N, 9, 32, 32, 3) uint8; see `train_vae`."""

    def draw() -> Tensor:
        return to_pixels(films[torch.randint(len(films), (batch_size,), device=films.device)])

    train_vae(vae, draw, seconds, recorded=True)


def to_pixels(films: Tensor) -> Tensor:
    """(N, F, H, W, 3) uint8 to (N, 3, F, H, W) fp32 in −1 … 1."""
    return films.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@torch.no_grad()
def fidelity(vae: Any, films: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of `films`, (N, 9, 32, 32, 3) uint8, that went through the autoencoder."""
    pixels = to_pixels(films)
    painted = vae.decode(vae.encode(pixels).latent_dist.mode(), return_dict=False)[0].clamp(-1, 1)
    return 10 * math.log10(4 / (painted - pixels).square().mean().item())


def encode_films(vae: Any, films: Tensor) -> Tensor:
    """Normalized latents (N, 16, 3, 4, 4) fp32 of (N, 9, 32, 32, 3) uint8."""
    return encode(vae, map(to_pixels, torch.split(films, LATENT_BATCH)))


@torch.no_grad()
def encode_prompts(pipeline: Any, prompts: list[str]) -> Tensor:
    """Returns the transformer's input: embeddings (N, 512, 64) fp32, zero where padded."""
    starts = range(0, len(prompts), EMBEDDING_BATCH)
    parts = [prompts[start : start + EMBEDDING_BATCH] for start in starts]
    embeds = [
        pipeline.encode_prompt(part, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS)[0]
        for part in parts
    ]
    return torch.cat(embeds)


def train_transformer(
    pipeline: Any,
    latents: Tensor,
    captions: Tensor,
    prompts: list[str],
    seconds: float,
    batch_size: int,
    on_log: Callable[[], None],
) -> None:
    """Flow matching on `latents` (N, 16, 3, 4, 4): the velocity noise − latents at logit-normal times; see
    `train_average`. `captions` (N,) says which of `prompts` a film is captioned with."""
    embeds, device = encode_prompts(pipeline, prompts), latents.device

    def loss_of(student: Any) -> Loss:
        def loss() -> Tensor:
            rows = torch.randint(len(latents), (batch_size,), device=device)
            clean = latents[rows]
            noise = torch.randn_like(clean)
            sigmas = torch.sigmoid(1.2 * torch.randn(batch_size, device=device) + 0.7)
            noisy = torch.lerp(clean, noise, sigmas.view(-1, 1, 1, 1, 1))
            prompt = embeds[captions[rows]]
            velocity = student(noisy, timestep=1000 * sigmas, encoder_hidden_states=prompt, return_dict=False)[0]
            error: Tensor = velocity.float() - (noise - clean)
            return error.square().mean()

        return loss

    train_average(pipeline.transformer, loss_of, seconds, 1e-3, on_log, recorded=True)
