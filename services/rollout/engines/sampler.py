"""Sampling with a model adapter: the very functions that the trainer calls, without gradients. Synchronous.

Rows are batched in (group, index) order; every row's initial latents and noise come from its own seed. A batch is cut
at `max_batch` rows and all rows of a request are padded to one text width, so a request repeated makes the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowfleet import devices
from flowfleet.algorithms.sde import STEPS, StepResult, ode_step
from flowfleet.models import ModelAdapter, PromptEmbeds, Schedule
from flowfleet.models.base import concat_embeds
from flowfleet.trajectories import Trajectory
from services.rollout.engines.base import GeneratedBatch, GeneratedSample, GenerationRequest

ENCODE_CHUNK = 64
"""Prompts encoded at once: bounds the text encoder's memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to make."""

    group: int
    index: int
    seed: int
    initial_seed: int
    """Of its initial latents; the same for a whole group if that is shared."""
    prompt: int
    """Its row of `Encoded.prompts`."""


@dataclass(frozen=True)
class Encoded:
    """The prompts of a request, one row a group in the request's order, and the negative one if guided."""

    prompts: PromptEmbeds
    negative: PromptEmbeds | None
    seconds: float


@dataclass
class _Path:
    """What a trajectory keeps of a batch, a list entry for each noisy step."""

    latents: list[Tensor] = field(default_factory=list)
    next_latents: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def keep(self, latents: Tensor, result: StepResult) -> None:
        self.latents.append(latents)
        self.next_latents.append(result.prev_sample)
        self.log_probs.append(result.log_prob)


class Sampler:
    """Draws samples from `adapter.transformer` as it is now."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._negatives: dict[str, PromptEmbeds] = {}

    @torch.no_grad()
    def encode(self, request: GenerationRequest) -> Encoded:
        """Encodes each group's prompt once."""
        with _timed(self._adapter.device) as seconds:
            texts = [group.prompt for group in request.groups]
            chunks = [texts[start : start + ENCODE_CHUNK] for start in range(0, len(texts), ENCODE_CHUNK)]
            prompts = concat_embeds([self._adapter.encode(chunk) for chunk in chunks])
            negative = self._negative(request)
        return Encoded(prompts, negative, seconds[0])

    @torch.no_grad()
    def sample(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        """Makes one batch. `checkpoint` is called before every denoising step and may raise to give the batch up."""
        prompts = encoded.prompts.select([row.prompt for row in rows])
        with _timed(self._adapter.device) as denoise_s:
            latents, path = self._denoise(request, prompts, encoded.negative, rows, checkpoint)
        with _timed(self._adapter.device) as decode_s:
            images = self._adapter.decode(latents, request.sampling.height, request.sampling.width).numpy()
        trajectories = _trajectories(path, request, self._schedule(request)) if path else [None] * len(rows)
        samples = tuple(
            GeneratedSample(row.group, row.index, row.seed, image, trajectory)
            for row, image, trajectory in zip(rows, images, trajectories, strict=True)
        )
        groups = {row.group: encoded.prompts.select([row.prompt]).to("cpu") for row in rows}
        negative = None if encoded.negative is None else encoded.negative.to("cpu")
        encode_s = encoded.seconds * len(rows) / request.num_samples
        seconds = {"encode": encode_s, "denoise": denoise_s[0], "decode": decode_s[0]}
        return GeneratedBatch(samples, groups, negative, seconds)

    def _denoise(
        self,
        request: GenerationRequest,
        prompts: PromptEmbeds,
        negative: PromptEmbeds | None,
        rows: Sequence[Row],
        checkpoint: Callable[[], None],
    ) -> tuple[Tensor, _Path | None]:
        """Final latents (B, *latent) float32, and the noisy steps if they are wanted."""
        sampling, noise, adapter = request.sampling, request.noise, self._adapter
        schedule = self._schedule(request)
        seeds = [row.seed for row in rows]
        initial_seeds = [row.initial_seed for row in rows]
        latents = adapter.initial_latents(initial_seeds, sampling.height, sampling.width).to(adapter.device)
        path = _Path() if request.keep_trajectory else None
        for step in range(schedule.num_steps):
            checkpoint()
            velocity = adapter.velocity(
                adapter.transformer,
                latents,
                schedule.timesteps[step],
                prompts,
                height=sampling.height,
                width=sampling.width,
                negative=negative,
                guidance_scale=sampling.guidance_scale,
            )
            sigma, sigma_next = schedule.sigmas[step], schedule.sigmas[step + 1]
            if step not in noise.steps:
                latents = ode_step(latents, velocity, sigma, sigma_next)
                continue
            drawn = adapter.step_noise(seeds, step, latents.shape[1:]).to(adapter.device)
            result = STEPS[noise.step_type](
                latents, velocity, sigma, sigma_next, eta=noise.eta, sigma_max=schedule.sigma_max, noise=drawn
            )
            if path is not None:
                path.keep(latents, result)
            latents = result.prev_sample
        return latents, path

    def _schedule(self, request: GenerationRequest) -> Schedule:
        sampling = request.sampling
        return self._adapter.schedule(sampling.num_steps, sampling.height, sampling.width)

    def _negative(self, request: GenerationRequest) -> PromptEmbeds | None:
        """Encoded alone, so that its bits depend on nothing else."""
        if request.sampling.guidance_scale <= 1:
            return None
        text = request.sampling.negative_prompt
        if text not in self._negatives:
            self._negatives[text] = self._adapter.encode([text])
        return self._negatives[text]


def batches(request: GenerationRequest, max_batch: int) -> list[list[Row]]:
    """The rows of a request in (group, index) order, cut at `max_batch`."""
    rows = [
        Row(group.group, index, seed, group.initial_seed if request.noise.share_initial else seed, prompt)
        for prompt, group in enumerate(request.groups)
        for index, seed in zip(group.indices, group.seeds, strict=True)
    ]
    return [rows[start : start + max_batch] for start in range(0, len(rows), max_batch)]


def _trajectories(path: _Path, request: GenerationRequest, schedule: Schedule) -> list[Trajectory]:
    """One a row, on the CPU; they share the batch's memory."""
    steps = torch.tensor(request.noise.steps)
    latents, next_latents = torch.stack(path.latents, 1).cpu(), torch.stack(path.next_latents, 1).cpu()
    log_probs = torch.stack(path.log_probs, 1).cpu()
    sigmas, sigmas_next, timesteps = schedule.sigmas[steps], schedule.sigmas[steps + 1], schedule.timesteps[steps]
    return [
        Trajectory(latents[row], next_latents[row], log_probs[row], sigmas, sigmas_next, timesteps, steps)
        for row in range(len(latents))
    ]


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that holds the seconds spent inside once it is left."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    devices.synchronize(device)
    seconds.append(time.perf_counter() - start)
