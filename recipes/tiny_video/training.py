"""Supervised training of the tiny video model: first the autoencoder, then the transformer on its latents.

Both run for a number of seconds rather than steps, as those of the tiny picture model do. On a GPU a step of so small
a model is a thousand kernels of a few microseconds each, which Python launches more slowly than they run: there it is
recorded once as a CUDA graph and replayed.
"""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes.tiny.components import round_to_half
from recipes.tiny.training import Budget
from recipes.tiny_video.components import MAX_TOKENS

logger = logging.getLogger(__name__)

LATENT_BATCH = 512
EMBEDDING_BATCH = 64


class Learner:
    """Minimizes a loss over the weights of a module, at the rate set before each step."""

    def __init__(self, module: torch.nn.Module, loss: Callable[[], Tensor], betas: tuple[float, float]) -> None:
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._device = self._weights[0].device
        on_gpu = self._device.type == "cuda"
        rate = torch.zeros((), device=self._device) if on_gpu else 0.0
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=rate, betas=betas, weight_decay=0.01, fused=True, capturable=on_gpu
        )
        self._loss = loss
        self._step = self._recorded() if on_gpu else self._once

    def step(self, rate: float) -> Tensor:
        """Makes an update; returns the loss, 0-d."""
        group = self._optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        return self._step()

    def _once(self) -> Tensor:
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda", cache_enabled=False):
            loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        return loss.detach()

    def _recorded(self) -> Callable[[], Tensor]:
        """`_once` as a CUDA graph, waited for at each replay so that seconds are counted right."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._once()  # at a rate of 0
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._once()

        def replay() -> Tensor:
            graph.replay()
            torch.cuda.synchronize()
            return loss

        return replay


def train_vae(vae: Any, films: Tensor, seconds: float, batch_size: int) -> None:
    """Teach the autoencoder `films`, (N, 9, 32, 32, 3) uint8, in place; its weights end rounded to fp16.

    Latents are the mode of the posterior, trained with a little noise so that the decoder forgives small errors.
    """

    def loss() -> Tensor:
        pixels = to_pixels(films[torch.randint(len(films), (batch_size,), device=films.device)])
        modes = vae.encode(pixels).latent_dist.mode()
        painted = vae.decode(modes + 0.03 * torch.randn_like(modes), return_dict=False)[0]
        error = painted.float() - pixels
        size = modes.float().square().mean()
        total: Tensor = 4 * error.square().mean() + 0.2 * error.abs().mean() + 1e-4 * size
        return total

    budget = Budget(seconds)
    learner = Learner(vae, loss, betas=(0.9, 0.99))
    last = torch.tensor(math.nan)
    while (progress := budget.progress) < 1:
        last = learner.step(2e-3 * min(1.0, (budget.num_steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress)))
        if budget.step():
            logger.info("vae step %d loss %.4f", budget.num_steps, last.item())
    logger.info("vae trained for %d steps, loss %.4f", budget.num_steps, last.item())
    round_to_half(vae.eval().requires_grad_(False))


def to_pixels(films: Tensor) -> Tensor:
    """(N, F, H, W, 3) uint8 to (N, 3, F, H, W) fp32 in −1 … 1."""
    return films.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@torch.no_grad()
def fidelity(vae: Any, films: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of `films`, (N, 9, 32, 32, 3) uint8, that went through the autoencoder."""
    pixels = to_pixels(films)
    painted = vae.decode(vae.encode(pixels).latent_dist.mode(), return_dict=False)[0].clamp(-1, 1)
    return 10 * math.log10(4 / (painted - pixels).square().mean().item())


@torch.no_grad()
def encode_films(vae: Any, films: Tensor) -> Tensor:
    """Normalized latents (N, 16, 3, 4, 4) fp32 of (N, 9, 32, 32, 3) uint8; mean and std go into the config."""
    parts = [vae.encode(to_pixels(part)).latent_dist.mode() for part in torch.split(films, LATENT_BATCH)]
    latents = torch.cat(parts)
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)


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
    """Flow matching on `latents` (N, 16, 3, 4, 4): the velocity noise − latents at logit-normal times.

    `captions` (N,) says which of `prompts` a film is captioned with. The pipeline's transformer becomes the moving
    average of the weights, rounded to fp16. `on_log` is called now and then, the pipeline then holding the average so
    far.
    """
    average = pipeline.transformer.requires_grad_(False)
    student = copy.deepcopy(average).requires_grad_(True)
    embeds = encode_prompts(pipeline, prompts)
    device = latents.device

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

    budget = Budget(seconds)
    learner = Learner(student, loss, betas=(0.9, 0.99))
    last = torch.tensor(math.nan)
    while (progress := budget.progress) < 1:
        last = learner.step(1e-3 * min(1.0, (budget.num_steps + 1) / 300, max(0.02, (1 - progress) / 0.4)))
        with torch.no_grad():
            decay = min(0.999, (budget.num_steps + 1) / (budget.num_steps + 51))
            torch._foreach_lerp_(list(average.parameters()), list(student.parameters()), 1 - decay)
        if budget.step():
            logger.info("transformer step %d loss %.4f", budget.num_steps, last.item())
            on_log()
    logger.info("transformer trained for %d steps, loss %.4f", budget.num_steps, last.item())
    round_to_half(average.eval())
