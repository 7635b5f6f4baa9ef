"""Interface between the update loop (services/trainer/step/update.py) and an objective."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any, Protocol

import torch
from torch import Tensor

from flowfleet.algorithms.parts import LatentParts
from flowfleet.algorithms.sde import StepResult, reverse_step
from flowfleet.algorithms.settings import RatioSettings
from flowfleet.hardware import devices
from flowfleet.process.telemetry import Timings
from services.trainer.model.engine import Engine
from services.trainer.model.policies import needs_reference
from services.trainer.step.gradients.gradients import RewardGradients
from services.trainer.step.inputs import Batch, FlowBatch, StepsBatch
from services.trainer.step.totals import Totals


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward and backward pass of an update."""

    batch: Batch
    component: str
    """The expert that it goes through."""
    losses: Callable[[], Tensor]
    """Runs the forward: (B,) with gradient."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Parts of an objective, for one training step."""

    engine: Engine
    step: int
    sde_steps: Sequence[int]
    """The denoising steps at which noise entered, or that samples were stored at."""
    totals: Totals
    rewards: RewardGradients | None = None
    """Gradients of rewards, for losses that follow them."""


class Objective(Protocol):
    """Objective of one step on one rank. Rows are (sample, round) pairs: a micro-batch goes forward once per round."""

    @property
    def num_rounds(self) -> int: ...

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """Collective. Takes the rank's micro-batches of each update of the next pass, and computes what other policies
        say of them."""

    def forwards(self, update: int) -> Sequence[Forward]:
        """The forwards of an update of this pass, in order. They go through the same experts on every rank."""


class RatioObjective(ABC):
    """Objectives of losses with a ratio to the old policy. A rank's samples are the same in every pass, so everything
    that other policies say of them is known after the first."""

    def __init__(self, inputs: StepInputs) -> None:
        self._engine, self._totals, self._spec = inputs.engine, inputs.totals, inputs.engine.spec
        self._part, self._loss = self._spec.algorithm.of(RatioSettings), self._spec.loss.load()
        self._batches: list[list[Any]] = []
        self._num_passes = 0
        self._known: dict[tuple[str, int], Tensor] = {}
        """Values before the step's first optimizer update, by name and row: later passes form other batches."""

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """See `Objective`: what the reference says, and old log-probs where an update's first forward does not give
        them: it is the old policy's only until the optimizer has moved the weights."""
        self._batches = [list(part) for part in batches]
        self._num_passes += 1
        if self._num_passes > 1:
            return
        if needs_reference(self._spec):
            with timings("ref"), torch.no_grad(), self._engine.policy("reference"):
                self._add_references([batch for part in self._batches for batch in part])
                devices.synchronize(self._engine.ranks.device)
        is_late = [
            self._spec.recomputes_all or (self._part.old_log_probs == "first_forward" and update > 0)
            for update in range(len(batches))
        ]
        if late := list(chain.from_iterable(compress(self._batches, is_late))):
            with timings("old_log_prob"), torch.no_grad():
                self._add_old(late)
                self._engine.reshard()
                devices.synchronize(self._engine.ranks.device)

    def _keep(self, name: str, batch: Batch, parts: Iterable[Tensor]) -> None:
        self._known |= {(name, row): part for row, part in zip(batch.rows, parts, strict=True)}

    def _kept(self, name: str, batch: Batch) -> list[Tensor] | None:
        """The part of each row; None where it was not computed."""
        return [self._known[name, row] for row in batch.rows] if (name, batch.rows[0]) in self._known else None

    @abstractmethod
    def _add_references(self, batches: Sequence[Any]) -> None:
        """Keeps what the active policy, the reference, says of micro-batches."""

    @abstractmethod
    def _add_old(self, batches: Sequence[Any]) -> None:
        """Keeps what the active policy, the old one, says of micro-batches."""


def velocity(engine: Engine, latents: Tensor, timestep: Tensor, batch: FlowBatch) -> Tensor:
    """(B, *latent) float32 of the active policy, guided as the rollout's: it is the guided model that samples."""
    rollout = engine.spec.rollout
    engine.ranks.beats.beat()
    predicted: Tensor = engine.adapter.velocity(
        latents, timestep, batch.prompts, size=batch.size, guidance=rollout.guidance, negative=batch.negative
    )
    return predicted


def stored_step(engine: Engine, batch: StepsBatch, k: int, step: int) -> StepResult:
    """Evaluates the k-th stored step, denoising step `step`, of the active policy at the stored next latents."""
    noise, sized = engine.spec.rollout.noise, engine.sizes.of(batch.size)
    schedule = sized.schedule
    return replace(reverse_step(noise.type), parts=sized.parts)(
        batch.latents[k],
        velocity(engine, batch.latents[k], schedule.timesteps[step], batch),
        schedule.sigmas[step],
        schedule.sigmas[step + 1],
        eta=noise.eta,
        sigma_max=schedule.sigma_max,
        prev_sample=batch.next_latents[k],
    )


def latent_parts(engine: Engine, batch: FlowBatch) -> LatentParts | None:
    """Parts of a batch's samples, with their weights."""
    return engine.sizes.of(batch.size).parts
