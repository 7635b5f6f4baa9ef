"""Supervised training of a tiny model: first the autoencoder, then the transformer on its latents.

Both run for a number of seconds rather than steps, so that the learning rate always comes down to its end: on a
slower machine the result is worse, but complete.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable
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

Loss = Callable[[], Tensor]


@dataclass
class Budget:
    """Counts steps until `seconds` have passed since it was made. With one thread these are the processor's, so that a
    busy machine makes as many steps."""

    seconds: float

    def __post_init__(self) -> None:
        self.num_steps = 0
        self._clock = time.process_time if torch.get_num_threads() == 1 else time.monotonic
        self._started = self._logged = self._clock()

    @property
    def progress(self) -> float:
        """Share of the time that has passed, 0 at the start and 1 or more at the end."""
        return (self._clock() - self._started) / self.seconds

    def step(self) -> bool:
        """Count a step; True where it is time to log."""
        self.num_steps += 1
        due = self._clock() - self._logged > LOG_EVERY_S
        self._logged = self._clock() if due else self._logged
        return due


class Learner:
    """Minimizes a loss over the weights of a module with AdamW, at the rate set before each step.

    `recorded`: on a GPU a step of so small a model is a thousand kernels of a few microseconds each, which Python
    launches more slowly than they run: there it is recorded once as a CUDA graph and replayed. The loss must then
    compute on the GPU alone.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss, *, recorded: bool, **settings: Any) -> None:
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._device = self._weights[0].device
        recorded = recorded and self._device.type == "cuda"
        usual: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.01, "fused": True, "capturable": recorded}
        rate = torch.zeros((), device=self._device) if recorded else 0.0
        self._optimizer = torch.optim.AdamW(self._weights, lr=rate, **usual | settings)
        self._loss = loss
        self._step = self._recorded() if recorded else self._once

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

    def _recorded(self) -> Loss:
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


def train_vae(vae: Any, draw: Loss, seconds: float, *, recorded: bool, **settings: Any) -> None:
    """Teach the autoencoder what `draw` gives, (N, 3, F, H, W) fp32 in −1 … 1, in place; its weights end rounded to
    fp16.

    Latents are the mode of the posterior, trained with a little noise so that the decoder forgives small errors, with a
    light pull to zero. `settings` are AdamW's.
    """

    def loss() -> Tensor:
        pixels = draw()
        modes = vae.encode(pixels).latent_dist.mode()
        painted = vae.decode(modes + 0.03 * torch.randn_like(modes), return_dict=False)[0]
        error = painted.float() - pixels
        size = modes.float().square().mean()
        total: Tensor = 4 * error.square().mean() + 0.2 * error.abs().mean() + 1e-4 * size
        return total

    learner, budget, last = Learner(vae, loss, recorded=recorded, **settings), Budget(seconds), torch.tensor(math.nan)
    while (progress := budget.progress) < 1:
        last = learner.step(2e-3 * min(1.0, (budget.num_steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress)))
        if budget.step():
            logger.info("vae step %d loss %.4f", budget.num_steps, last.item())
    logger.info("vae trained for %d steps, loss %.4f", budget.num_steps, last.item())
    round_to_half(vae.eval().requires_grad_(False))


def train_average(
    average: Any,
    loss_of: Callable[[Any], Loss],
    seconds: float,
    rate: float,
    on_log: Callable[[], None],
    *,
    recorded: bool,
) -> None:
    """Minimizes `loss_of` a copy of a transformer, which becomes the moving average of the copy's weights, rounded to
    fp16. `on_log` is called now and then, with the average so far in place."""
    average.requires_grad_(False)
    student = copy.deepcopy(average).requires_grad_(True)
    loss = loss_of(student)
    budget, learner, last = Budget(seconds), Learner(student, loss, recorded=recorded), torch.tensor(math.nan)
    while (progress := budget.progress) < 1:
        last = learner.step(rate * min(1.0, (budget.num_steps + 1) / 300, max(0.02, (1 - progress) / 0.4)))
        with torch.no_grad():
            decay = min(0.999, (budget.num_steps + 1) / (budget.num_steps + 51))
            torch._foreach_lerp_(list(average.parameters()), list(student.parameters()), 1 - decay)
        if budget.step():
            logger.info("transformer step %d loss %.4f", budget.num_steps, last.item())
            on_log()
    logger.info("transformer trained for %d steps, loss %.4f", budget.num_steps, last.item())
    round_to_half(average.eval())


@torch.no_grad()
def encode(vae: Any, parts: Iterable[Tensor]) -> Tensor:
    """Normalized latents (N, 16, f, h, w) fp32 of pixels (N, 3, F, H, W) in parts; mean and std go into the config."""
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in parts])
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)


# The tiny sign painter -----------------------------------------------------------------------------------------------


def to_video(pixels: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 to (N, 3, 1, H, W) fp32 in −1 … 1."""
    return (pixels.float() / 127.5 - 1)[:, :, None]


def train_image_vae(vae: Any, pixels: Tensor, seconds: float, batch_size: int) -> None:
    """Teach the autoencoder `pixels`, (N, 3, 64, 64) uint8, which stay in host memory; see `train_vae`."""
    device = next(vae.parameters()).device

    def draw() -> Tensor:
        return to_video(pixels[torch.randint(len(pixels), (batch_size,))].to(device))

    train_vae(vae, draw, seconds, recorded=False, betas=(0.9, 0.999), weight_decay=1e-4, fused=False)


def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Packed, normalized latents (N, 16, 64) fp32 of (N, 3, 64, 64) uint8."""
    device = next(vae.parameters()).device
    latents = encode(vae, (to_video(part.to(device)) for part in torch.split(pixels, LATENT_BATCH)))
    edge = NUM_PATCHES_PER_EDGE
    patches = latents.view(-1, LATENT_CHANNELS, edge, 2, edge, 2)
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
    pipeline: Any, latents: Tensor, prompts: list[str], seconds: float, batch_size: int, on_log: Callable[[], None]
) -> None:
    """Flow matching on `latents` (N, 16, 64): the velocity noise − latents at logit-normal times; see
    `train_average`."""
    device = latents.device
    embeds, masks = encode_prompts(pipeline, prompts)
    shapes = [[(1, NUM_PATCHES_PER_EDGE, NUM_PATCHES_PER_EDGE)]] * batch_size

    def loss_of(student: Any) -> Loss:
        velocity = torch.compile(student) if device.type == "cuda" else student

        def loss() -> Tensor:
            rows = torch.randint(len(latents), (batch_size,), device=device)
            clean, noise = latents[rows], torch.randn_like(latents[rows])
            sigmas = torch.sigmoid(1.2 * torch.randn(batch_size, device=device) + 0.3)
            predicted = velocity(
                hidden_states=torch.lerp(clean, noise, sigmas[:, None, None]),
                encoder_hidden_states=embeds[rows],
                encoder_hidden_states_mask=masks[rows],
                timestep=sigmas,
                img_shapes=shapes,
                return_dict=False,
            )[0]
            error: Tensor = predicted.float() - (noise - clean)
            return error.square().mean()

        return loss

    train_average(pipeline.transformer, loss_of, seconds, 1.5e-3, on_log, recorded=False)
