"""Supervised training of the tiny model: first the autoencoder, then the transformer on its latents.

Both run for a number of seconds rather than steps, so that the learning rate always comes down to its end: on a
slower machine the result is worse, but complete.
"""

import copy
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.tiny.components import LATENT_CHANNELS, round_to_half

logger = logging.getLogger(__name__)

NUM_PATCHES_PER_EDGE = 4
"""A 64-pixel sign has 8×8 latents, packed two by two."""

EMBEDDING_BATCH = 2000
LATENT_BATCH = 512
LOG_EVERY_S = 30.0


@dataclass
class Budget:
    """Counts steps until `seconds` have passed since it was made."""

    seconds: float

    def __post_init__(self) -> None:
        self.num_steps = 0
        self._started = self._logged = time.monotonic()

    @property
    def progress(self) -> float:
        """Share of the time that has passed, 0 at the start and 1 or more at the end."""
        return (time.monotonic() - self._started) / self.seconds

    def step(self) -> bool:
        """Count a step; True where it is time to log."""
        self.num_steps += 1
        due = time.monotonic() - self._logged > LOG_EVERY_S
        self._logged = time.monotonic() if due else self._logged
        return due


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train_vae(vae: Any, pixels: Tensor, seconds: float, batch_size: int) -> None:
    """Teach the autoencoder `pixels`, (N, 3, 64, 64) uint8, in place; its weights end rounded to fp16.

    Latents are the mode of the posterior, trained with a little noise so that the decoder forgives small errors.
    """
    device = next(vae.parameters()).device
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4)
    budget = Budget(seconds)
    while (progress := budget.progress) < 1:
        _set_rate(optimizer, 2e-3 * min(1.0, (budget.num_steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress)))
        images = to_video(pixels[torch.randint(len(pixels), (batch_size,))].to(device))
        with autocast(device):
            modes = vae.encode(images).latent_dist.mode()
            painted = vae.decode(modes + 0.03 * torch.randn_like(modes), return_dict=False)[0]
        loss = reconstruction_loss(images, modes, painted)
        _apply(optimizer, loss)
        if budget.step():
            logger.info("vae step %d loss %.4f", budget.num_steps, loss.item())
    logger.info("vae trained for %d steps, loss %.4f", budget.num_steps, loss.item())
    round_to_half(vae.eval().requires_grad_(False))


def reconstruction_loss(images: Tensor, modes: Tensor, painted: Tensor) -> Tensor:
    """Squared and absolute error of `painted` against `images`, with a light pull of the latents' `modes` to zero."""
    error = painted.float() - images
    return 4 * error.square().mean() + 0.2 * error.abs().mean() + 1e-4 * modes.float().square().mean()


def to_video(pixels: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 to (N, 3, 1, H, W) fp32 in −1 … 1."""
    return (pixels.float() / 127.5 - 1)[:, :, None]


@torch.no_grad()
def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Packed, normalized latents (N, 16, 64) fp32 of (N, 3, 64, 64) uint8; their mean and std go into the config."""
    device = next(vae.parameters()).device
    parts = torch.split(pixels, LATENT_BATCH)
    modes = [vae.encode(to_video(part.to(device))).latent_dist.mode() for part in parts]
    latents = torch.cat(modes)[:, :, 0]
    mean, std = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    edge = NUM_PATCHES_PER_EDGE
    patches = ((latents - mean[:, None, None]) / std[:, None, None]).view(-1, LATENT_CHANNELS, edge, 2, edge, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(len(patches), edge * edge, 4 * LATENT_CHANNELS)


@torch.no_grad()
def encode_prompts(pipeline: Any, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Returns the transformer's input: embeddings (N, T, 128) fp32, zero where padded, and mask (N, T) bool."""
    parts = []
    for start in range(0, len(prompts), EMBEDDING_BATCH):
        embeds, mask = pipeline.encode_prompt(prompts[start : start + EMBEDDING_BATCH])
        parts.append((embeds, torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask))
    length = max(embeds.shape[1] for embeds, _ in parts)
    embeds = torch.cat([torch.nn.functional.pad(embeds, (0, 0, 0, length - embeds.shape[1])) for embeds, _ in parts])
    masks = torch.cat([torch.nn.functional.pad(mask, (0, length - mask.shape[1])) for _, mask in parts])
    return embeds, masks.bool()


def train_transformer(
    pipeline: Any,
    latents: Tensor,
    prompts: list[str],
    seconds: float,
    batch_size: int,
    on_log: Callable[[], None],
) -> None:
    """Flow matching on `latents` (N, 16, 64): the velocity noise − latents at logit-normal times.

    The pipeline's transformer becomes the moving average of the weights, rounded to fp16. `on_log` is called now and
    then while the pipeline holds the average so far.
    """
    average = pipeline.transformer.requires_grad_(False)
    learner = copy.deepcopy(average).requires_grad_(True)
    device = latents.device
    embeds, masks = encode_prompts(pipeline, prompts)
    velocity = torch.compile(learner) if device.type == "cuda" else learner
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1.5e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    shapes = [[(1, NUM_PATCHES_PER_EDGE, NUM_PATCHES_PER_EDGE)]] * batch_size
    budget = Budget(seconds)
    while (progress := budget.progress) < 1:
        _set_rate(optimizer, 1.5e-3 * min(1.0, (budget.num_steps + 1) / 300, max(0.02, (1 - progress) / 0.4)))
        rows = torch.randint(len(latents), (batch_size,), device=device)
        clean, noise = latents[rows], torch.randn_like(latents[rows])
        sigmas = torch.sigmoid(1.2 * torch.randn(batch_size, device=device) + 0.3)
        with autocast(device):
            predicted = velocity(
                hidden_states=torch.lerp(clean, noise, sigmas[:, None, None]),
                encoder_hidden_states=embeds[rows],
                encoder_hidden_states_mask=masks[rows],
                timestep=sigmas,
                img_shapes=shapes,
                return_dict=False,
            )[0]
        loss = (predicted.float() - (noise - clean)).square().mean()
        _apply(optimizer, loss)
        with torch.no_grad():
            decay = min(0.999, (budget.num_steps + 1) / (budget.num_steps + 51))
            torch._foreach_lerp_(list(average.parameters()), list(learner.parameters()), 1 - decay)
        if budget.step():
            logger.info("transformer step %d loss %.4f", budget.num_steps, loss.item())
            on_log()
    logger.info("transformer trained for %d steps, loss %.4f", budget.num_steps, loss.item())
    round_to_half(average.eval())


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _apply(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
