"""Noise levels and noise of the matching losses, from the job's seed alone: no batch, rank or order changes them.

A sample's draws hang on its step, its group and its place there: its index; or its pair's number, so that both of a
pair share them; or 0, so that a group shares them. With two experts all rows of one forward, on all ranks, must lie on
one side of the experts' boundary: the side is drawn for each (step, update, round), as likely as its share of the noise
levels, and rows inside it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowfleet.algorithms.settings import NoiseLevelSettings
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter, seeded_noise
from flowfleet.seeds import derive_seed

Place = tuple[int, int]
"""Group, and index, number of the pair or 0."""
Interval = tuple[float, float]
"""Noise levels from and to."""

MARGIN = 1e-6
"""Distance kept from the boundary, so that no rounding puts a noise level on its other side."""
FINE_STEPS = 1000
"""Steps of the schedule that stands for the model's shift: as many as the levels that models are trained on."""


@dataclass(frozen=True)
class Draws(ABC):
    """Draws of one step of a job."""

    seed: int
    step: int
    boundary: float | None
    """Sigma that separates two experts."""

    @abstractmethod
    def interval(self, update: int, k: int) -> Interval:
        """Where the noise levels of round k lie: on one side of the boundary."""

    @abstractmethod
    def sigmas(self, places: Sequence[Place], update: int, k: int) -> Tensor:
        """(B,) float32 on the CPU, each in the round's interval."""

    def noise(self, places: Sequence[Place], k: int, shape: Sequence[int]) -> Tensor:
        """(B, *shape) float32 standard normal on the CPU."""
        return seeded_noise([derive_seed(self.seed, "match/noise", self.step, *place, k) for place in places], shape)

    def _uniform(self, purpose: str, *path: int) -> float:
        """In [0, 1)."""
        return derive_seed(self.seed, f"match/{purpose}", self.step, *path) / 2**63


@dataclass(frozen=True)
class ContinuousDraws(Draws):
    """sigma = Q(u) for a uniform u, cut to `levels`. A side of the boundary is drawn as likely as its share of u."""

    levels: Interval
    """The least and the greatest noise level."""
    quantiles: np.ndarray
    """(M + 1,) float64, rising: Q at u = 0, 1/M … 1, linear in between."""

    def interval(self, update: int, k: int) -> Interval:
        return self._side(update, k)[1]

    def sigmas(self, places: Sequence[Place], update: int, k: int) -> Tensor:
        (start, end), (low, high) = self._side(update, k)
        shares = [start + (end - start) * self._uniform("sigma", *place, k) for place in places]
        sigmas = np.interp(shares, np.linspace(0, 1, len(self.quantiles)), self.quantiles)
        return torch.from_numpy(np.clip(sigmas, low, high)).float()

    def _side(self, update: int, k: int) -> tuple[Interval, Interval]:
        """The u of the round, and the noise levels that they are cut to."""
        low, high = self.levels
        if self.boundary is None:
            return (0.0, 1.0), self.levels
        if low > self.boundary - MARGIN:
            return (0.0, 1.0), (max(low, self.boundary + MARGIN), max(high, self.boundary + MARGIN))
        if high < self.boundary + MARGIN:
            return (0.0, 1.0), (low, min(high, self.boundary - MARGIN))
        part = float(np.interp(self.boundary, self.quantiles, np.linspace(0, 1, len(self.quantiles))))
        if self._uniform("side", update, k) < part:
            return (0.0, part), (low, self.boundary - MARGIN)
        return (part, 1.0), (self.boundary + MARGIN, high)


@dataclass(frozen=True)
class ScheduleDraws(Draws):
    """The levels of the sampler, in an order of its own for each sample and pass, none twice in a pass.

    With two experts the order of sides is drawn for all samples together, by shuffling all levels; on either side each
    sample has its own order.
    """

    sigmas_of_steps: Tensor
    """(N,) float32 on the CPU."""
    num_rounds: int
    """Rounds of a pass, at most N; those of later passes are numbered on."""

    def interval(self, update: int, k: int) -> Interval:
        levels = self.sigmas_of_steps[self._side(update, k)[0]]
        return float(levels.min()), float(levels.max())

    def sigmas(self, places: Sequence[Place], update: int, k: int) -> Tensor:
        side, number = self._side(update, k)
        number_of_pass = k // self.num_rounds
        chosen = [side[int(self._shuffled(len(side), "order", *place, number_of_pass)[number])] for place in places]
        return self.sigmas_of_steps[torch.stack(chosen)]

    def _side(self, update: int, k: int) -> tuple[Tensor, int]:
        """Indices of the levels on the round's side, and how many rounds of its pass before it were there."""
        number_of_pass, k = divmod(k, self.num_rounds)
        if self.boundary is None:
            return torch.arange(len(self.sigmas_of_steps)), k
        is_high = 1000 * self.sigmas_of_steps >= self.boundary * 1000  # as the adapter chooses an expert
        sides = is_high[self._shuffled(len(is_high), "sides", update, number_of_pass)]
        return (is_high == sides[k]).nonzero().flatten(), int((sides[:k] == sides[k]).sum())

    def _shuffled(self, count: int, purpose: str, *path: int) -> Tensor:
        """(count,) A permutation."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, f"match/{purpose}", self.step, *path))
        return torch.randperm(count, generator=generator)


def draws_of(spec: JobSpec, adapter: ModelAdapter, step: int) -> Draws:
    """The draws that the job's `algorithm.sigma_sampling` names."""
    part, rollout = spec.algorithm.of(NoiseLevelSettings), spec.rollout
    boundary = adapter.boundary if len(adapter.experts) > 1 else None
    if part.sigma_sampling == "schedule":
        schedule = adapter.schedule(rollout.num_inference_steps, rollout.size, rollout.shift)
        return ScheduleDraws(spec.seed, step, boundary, schedule.sigmas[:-1], part.num_noise_levels)
    levels = part.sigma_low, part.sigma_high
    quantiles = np.array(levels)
    if part.sigma_sampling == "shifted":
        quantiles = adapter.schedule(FINE_STEPS, rollout.size, rollout.shift).sigmas.double().numpy()[::-1].copy()
    return ContinuousDraws(spec.seed, step, boundary, levels, quantiles)
