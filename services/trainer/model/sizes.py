"""Values that depend on a sample's size: its latents, their parts and its schedule."""

import math
from dataclasses import dataclass
from functools import lru_cache

from flowfleet.algorithms.coarse import check_noise
from flowfleet.algorithms.parts import LatentParts
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter, Schedule
from flowfleet.models.settings import Size

MAX_SIZES = 256
"""Sizes that are remembered."""


@dataclass(frozen=True)
class Sized:
    """Values of one size."""

    shape: tuple[int, ...]
    """Shape of a sample's latents."""
    parts: LatentParts | None
    """Parts of films with sound, with their weights."""
    schedule: Schedule
    """Schedule that rollouts sample with."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Sizes:
    """Values of each size of a job."""

    def __init__(self, adapter: ModelAdapter, spec: JobSpec) -> None:
        self._adapter, self._spec = adapter, spec
        self.of = lru_cache(MAX_SIZES)(self._of)
        """Gives the values of a size. Raises ValueError for one that the model cannot draw, or whose steps are too
        coarse for the job's noise."""

    def _of(self, size: Size) -> Sized:
        rollout = self._spec.rollout
        parts = LatentParts.of(self._adapter.part_lengths(size), rollout.sound_share)
        schedule = self._adapter.schedule(rollout.num_inference_steps, size, rollout.shift)
        check_noise(self._spec, schedule)
        return Sized(tuple(self._adapter.latent_shape(size)), parts, schedule)
