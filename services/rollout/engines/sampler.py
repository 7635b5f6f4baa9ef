"""Sampling with a model adapter, by the functions that the trainer calls, without gradients. Synchronous.

Rows are batched in (group, index) order; every row's initial latents and noise come from its own seed. A batch is cut
at `max_batch` rows and its prompts are padded to the longest of them, so a repeated request makes the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flowfleet.algorithms.losses import reference_kl
from flowfleet.algorithms.parts import LatentParts, scaled
from flowfleet.algorithms.samplers import tail_length
from flowfleet.algorithms.sde import StepResult, ode_step, reverse_step
from flowfleet.algorithms.solver import Prediction, dpm_solver_2_step, predict, tail_sigmas
from flowfleet.data.trajectories import FinalLatents, Trajectory
from flowfleet.media.sound import Sound
from flowfleet.models.base import ModelAdapter, NotFinite, Schedule
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.settings import Size
from flowfleet.quantization.layers import full_precision
from flowfleet.weights.lora import adapter_disabled
from services.rollout.engines.base import GeneratedBatch, GeneratedSample, GenerationRequest
from services.rollout.engines.prompts import Encoded, PromptEncoder, timed


@dataclass(frozen=True, slots=True)
class Row:
    """Sample to make."""

    group: int
    index: int
    seed: int
    initial_seed: int
    """Seed of its initial latents; the same for a whole group if they are shared."""
    prompt: int
    """Its row of `Encoded.prompts`."""
    media: np.ndarray | None = None
    """(F, H, W, 3) uint8, to be encoded in place of sampling."""


_Prompts = tuple[PromptEmbeds, PromptEmbeds | None]
"""Prompts of a batch: one row per sample, and the negative ones: one row for all, or one each."""


@dataclass
class _Path:
    """The noisy steps of a batch, a list entry each."""

    latents: list[Tensor] = field(default_factory=list)
    next_latents: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    """(B,) each, or (B, P) of latents with parts."""
    reference_kls: list[Tensor] = field(default_factory=list)
    """(B,) each, if they were asked for."""

    def keep(self, latents: Tensor, result: StepResult) -> None:
        self.latents.append(latents)
        self.next_latents.append(result.prev_sample)
        of_parts = result.part_log_probs
        self.log_probs.append(result.log_prob if of_parts.shape[1] == 1 else of_parts)


@dataclass(frozen=True)
class _Made:
    """A batch before it is cut into samples."""

    frames: np.ndarray
    """(B, F, H, W, 3) uint8."""
    records: Sequence[Trajectory | FinalLatents | None]
    reference_kls: Sequence[float]
    seconds: dict[str, float]
    failures: Sequence[str]
    """Why a row is no sample; "" where it is one."""
    sounds: Sequence[Sound | None]

    def select(self, rows: Sequence[int], share: float) -> "_Made":
        """Some rows, with a share of the seconds."""
        records, kls, failures, sounds = (
            [values[row] for row in rows] for values in (self.records, self.reference_kls, self.failures, self.sounds)
        )
        seconds = {part: share * value for part, value in self.seconds.items()}
        return _Made(self.frames[list(rows)], records, kls, seconds, failures, sounds)  # type: ignore[arg-type]


class Sampler:
    """Draws samples from the adapter's transformers as they are now."""

    def __init__(
        self, adapter: ModelAdapter, without_lora: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        """`without_lora`: inside, the transformers compute as if they had no LoRA adapter; None is PEFT's way."""
        self._adapter = adapter
        self._without_lora = without_lora or (lambda: adapter_disabled(adapter.experts))
        self._prompts = PromptEncoder(adapter)

    def encode(self, request: GenerationRequest) -> Encoded:
        """See `PromptEncoder.encode`."""
        return self._prompts.encode(self._sized(request))

    def _sized(self, request: GenerationRequest) -> GenerationRequest:
        """The request whose size says what its condition images give."""
        if not (self._adapter.clean_frames and any(group.images for group in request.groups)):
            return request
        size = replace(request.sampling.size, clean_frames=self._adapter.clean_frames)
        return replace(request, sampling=replace(request.sampling, size=size))

    def sample(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        """Makes one batch. `checkpoint` is called before every denoising step (before each one of media) and may raise
        to give the batch up."""
        return self.sample_together([(request, encoded, rows)], checkpoint)[0]

    @torch.no_grad()
    def sample_together(
        self, parts: Sequence[tuple[GenerationRequest, Encoded, Sequence[Row]]], checkpoint: Callable[[], None]
    ) -> list[GeneratedBatch]:
        """Makes a batch for each part, all in one forward. Requests of several parts have an equal `forward_key`."""
        request = self._sized(parts[0][0])
        rows = [row for _, _, of_part in parts for row in of_part]
        media = [row.media for row in rows if row.media is not None]
        prompts = _joined(
            [(encoded.of([row.prompt for row in of_part]), len(of_part)) for _, encoded, of_part in parts]
        )
        cuts = [len(of_part) for _, _, of_part in parts]
        made = (
            self._given(request, media, checkpoint) if media else self._drawn(request, prompts, rows, cuts, checkpoint)
        )
        batches, start = [], 0
        for (own, encoded, of_part), length in zip(parts, cuts, strict=True):
            places = list(range(start, start + length))
            part = made if len(parts) == 1 else made.select(places, length / len(rows))
            of_prompts = prompts if len(parts) == 1 else tuple(one and one.select(places) for one in prompts)
            batches.append(self._batch(own, encoded, of_part, part, cast(_Prompts, of_prompts)))
            start += length
        return batches

    def _batch(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], made: "_Made", prompts: _Prompts
    ) -> GeneratedBatch:
        samples = tuple(
            GeneratedSample(
                row.group, row.index, row.seed, record, frames, sound, self._adapter.fps, reference_kl, failure=failure
            )
            for row, frames, sound, record, reference_kl, failure in zip(
                rows, made.frames, made.sounds, made.records, made.reference_kls, made.failures, strict=True
            )
        )
        seconds = made.seconds | {"encode": made.seconds["encode"] + encoded.seconds * len(rows) / request.num_samples}
        begun = {row.prompt for row in rows if request.groups[row.prompt].indices[0] == row.index}
        counts = {"cache": len(begun & encoded.cached), "encoder": len(begun - encoded.cached)}
        return GeneratedBatch(samples, *_by_group(prompts, rows), seconds, counts)

    def _given(self, request: GenerationRequest, media: Sequence[np.ndarray], checkpoint: Callable[[], None]) -> _Made:
        """Media that are there already, as latents: one by one, so that memory is bounded and each one's bits are its
        own."""
        records = []
        with timed(self._adapter.device) as encode_s:
            for frames in media:
                checkpoint()
                latents = self._adapter.encode_media(torch.from_numpy(frames[None]), request.sampling.size)
                records.append(FinalLatents(latents[0]))
        failures = _failures(torch.stack([record.latents for record in records]), "encoded")
        none = [None] * len(media)
        return _Made(np.stack(media), records, [0.0] * len(media), {"encode": encode_s[0]}, failures, none)

    def _drawn(
        self,
        request: GenerationRequest,
        prompts: _Prompts,
        rows: Sequence[Row],
        cuts: Sequence[int],
        checkpoint: Callable[[], None],
    ) -> _Made:
        """`cuts`: rows of each part, which is decoded alone, so that no part fails by another."""
        with timed(self._adapter.device) as denoise_s, self._precision(request):
            latents, path = self._denoise(request, prompts, rows, checkpoint)
        failures = _failures(latents, "denoised")
        with timed(self._adapter.device) as decode_s:
            decoded = [
                self._decoded(part, request.sampling.size, prompts[0].rows(len(rows)).select(places), of_part)
                if len(cuts) > 1
                else self._decoded(latents, request.sampling.size, prompts[0], failures)
                for part, places, of_part in _parts(latents, failures, cuts)
            ]
        frames = np.concatenate([part[0] for part in decoded]) if len(cuts) > 1 else decoded[0][0]
        sounds = [sound for part in decoded for sound in part[1]]
        failures = [failure for part in decoded for failure in part[2]]
        records: Sequence[Trajectory | FinalLatents | None] = [None] * len(rows)
        if request.record == "steps":
            records = _trajectories(path, request, self._schedule(request))
        elif request.record == "final":
            records = [FinalLatents(row) for row in latents.cpu()]
        kls = torch.stack(path.reference_kls).mean(0).tolist() if path.reference_kls else [0.0] * len(rows)
        seconds = {"encode": 0.0, "denoise": denoise_s[0], "decode": decode_s[0]}
        return _Made(frames, records, kls, seconds, failures, sounds)

    def _decoded(
        self, latents: Tensor, size: Size, prompts: PromptEmbeds, failures: list[str]
    ) -> tuple[np.ndarray, list[Sound | None], list[str]]:
        """Frames, black where a row failed, and sounds. Rows fail together where the VAE makes no picture of one of
        them."""
        kept = [row for row, failure in enumerate(failures) if not failure]
        frames = np.zeros((len(latents), size.num_frames, size.height, size.width, 3), np.uint8)
        sounds: list[Sound | None] = [None] * len(latents)
        try:
            if len(kept) == len(latents):
                frames = self._adapter.decode(latents, size, prompts).numpy()
            elif kept:
                latents = latents[kept]
                frames[kept] = self._adapter.decode(latents, size, prompts.select(kept)).numpy()
            if kept and self._adapter.part_lengths(size):
                waves, rate = self._adapter.decode_sound(latents, size)
                for row, wave in zip(kept, waves.numpy(), strict=True):
                    sounds[row] = Sound(wave, rate)
        except NotFinite as error:
            failures = [failure or str(error) for failure in failures]
        return frames, sounds, failures

    def _precision(self, request: GenerationRequest) -> AbstractContextManager[None]:
        """Computes with the weights as they are, where a replica with float8 copies is asked to."""
        if not request.sampling.full_precision:
            return nullcontext()
        return full_precision(chain(*(expert.modules() for expert in self._adapter.experts.values())))

    def _denoise(
        self, request: GenerationRequest, prompts: _Prompts, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> tuple[Tensor, _Path]:
        """Final latents (B, *latent) float32, and the noisy steps if they are wanted."""
        sampling, noise, adapter = request.sampling, request.noise, self._adapter
        course, path = _course(self._schedule(request), request), _Path()
        adapter.expect_levels(course.schedule.timesteps)
        seeds = [row.seed for row in rows]
        before: Prediction | None = None
        latents = adapter.initial_latents([row.initial_seed for row in rows], sampling.size).to(adapter.device)
        parts = LatentParts.of(adapter.part_lengths(sampling.size), sampling.sound_share)

        def velocity_at(step: int, latents: Tensor) -> Tensor:
            return adapter.velocity(
                latents,
                course.schedule.timesteps[step],
                prompts[0],
                size=sampling.size,
                guidance=sampling.guidance,
                negative=prompts[1],
            )

        for step, (sigma, sigma_next) in enumerate(pairwise(course.schedule.sigmas.tolist())):
            checkpoint()
            velocity = velocity_at(step, latents)
            now = predict(latents, velocity, sigma)
            if step in noise.steps:
                drawn = adapter.step_noise(seeds, step, latents.shape[1:]).to(adapter.device)
                reverse = partial(
                    replace(reverse_step(noise.step_type), parts=parts),
                    latents,
                    sigma=sigma,
                    sigma_next=sigma_next,
                    eta=noise.eta,
                    sigma_max=course.schedule.sigma_max,
                )
                result = reverse(velocity=velocity, noise=drawn)
                if request.record == "steps" and step in noise.kept:
                    path.keep(latents, result)
                if request.reference_kl:
                    with self._without_lora():
                        reference = reverse(velocity=velocity_at(step, latents), prev_sample=result.prev_sample)
                    means = scaled(result.mean, parts), scaled(reference.mean, parts)
                    path.reference_kls.append(reference_kl(*means, result.std))
                latents = result.prev_sample
            elif step < course.second_order_from:
                latents = ode_step(latents, velocity, sigma, sigma_next)
            else:
                latents = dpm_solver_2_step(latents, velocity, sigma_next, now, before)
            before = now
        return latents, path

    def _schedule(self, request: GenerationRequest) -> Schedule:
        sampling = request.sampling
        return self._adapter.schedule(sampling.num_steps, sampling.size, sampling.shift)


@dataclass(frozen=True)
class _Course:
    """The steps that a sample takes."""

    schedule: Schedule
    """The job's, or with a tail the job's up to the end of the last noisy step."""
    second_order_from: int
    """The first step that `dpm_solver_2` takes."""


def _course(schedule: Schedule, request: GenerationRequest) -> _Course:
    noise, num_steps = request.noise, schedule.num_steps
    tail = tail_length(noise.steps, num_steps, noise.tail_steps)
    if not tail:
        return _Course(schedule, 0 if request.sampling.sampler == "dpm_solver_2" else num_steps)
    start = noise.steps[-1] + 1
    late = tail_sigmas(schedule.sigmas[start].item(), 1 - start / num_steps, tail)
    sigmas = torch.cat([schedule.sigmas[:start], late])
    timesteps = torch.cat([schedule.timesteps[:start], 1000 * late[:-1]])
    return _Course(Schedule(timesteps, sigmas), start)


def _joined(parts: Sequence[tuple[_Prompts, int]]) -> _Prompts:
    """Prompts of several batches of so many rows, as those of one."""
    if len(parts) == 1:
        return parts[0][0]
    positive = concat_embeds([prompts[0] for prompts, _ in parts])
    negatives = [prompts[1].rows(count) for prompts, count in parts if prompts[1] is not None]
    return positive, concat_embeds(negatives) if negatives else None


def _parts(
    latents: Tensor, failures: Sequence[str], cuts: Sequence[int]
) -> Iterator[tuple[Tensor, list[int], list[str]]]:
    """Latents, rows and failures of each part."""
    start = 0
    for length in cuts:
        places = list(range(start, start + length))
        yield latents[start : start + length], places, [failures[place] for place in places]
        start += length


def _failures(latents: Tensor, how: str) -> list[str]:
    reason = (
        f"its latents are NaN or infinite when they are {how}: the weights, the adapter or their data type overflow; "
        "check the model's files, or set model.dtype"
    )
    return ["" if finite else reason for finite in latents.isfinite().flatten(1).all(dim=1).tolist()]


def batches(request: GenerationRequest, max_batch: int) -> list[list[Row]]:
    """The rows of a request in (group, index) order, cut at `max_batch`."""
    rows = [
        Row(
            group.group,
            index,
            seed,
            group.initial_seed if request.noise.share_initial else seed,
            prompt,
            group.media[position] if group.media else None,
        )
        for prompt, group in enumerate(request.groups)
        for position, (index, seed) in enumerate(zip(group.indices, group.seeds, strict=True))
    ]
    return [rows[start : start + max_batch] for start in range(0, len(rows), max_batch)]


def _by_group(prompts: _Prompts, rows: Sequence[Row]) -> tuple[dict[int, PromptEmbeds], dict[int, PromptEmbeds]]:
    """A batch's prompts on the CPU by group, one row each, and its negative ones: one object where all share it."""
    positive, negative = prompts
    row_of_group = {row.group: row_index for row_index, row in enumerate(rows)}
    prompt_of = {group: positive.select([row_index]).to("cpu") for group, row_index in row_of_group.items()}
    if negative is None:
        return prompt_of, {}
    if len(negative) == 1:
        return prompt_of, dict.fromkeys(row_of_group, negative.to("cpu"))
    return prompt_of, {group: negative.select([row_index]).to("cpu") for group, row_index in row_of_group.items()}


def _trajectories(path: _Path, request: GenerationRequest, schedule: Schedule) -> list[Trajectory]:
    """Returns a trajectory per row, on the CPU; they share the batch's memory."""
    steps = torch.tensor(request.noise.kept)
    latents, next_latents = torch.stack(path.latents, 1).cpu(), torch.stack(path.next_latents, 1).cpu()
    log_probs = torch.stack(path.log_probs, 1).cpu()
    sigmas, sigmas_next, timesteps = schedule.sigmas[steps], schedule.sigmas[steps + 1], schedule.timesteps[steps]
    return [
        Trajectory(latents[row], next_latents[row], log_probs[row], sigmas, sigmas_next, timesteps, steps)
        for row in range(len(latents))
    ]
