"""Interface between the update loop (services/trainer/step/update.py) and an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flowfleet.algorithms.sde import StepResult, reverse_step
from flowfleet.process.telemetry import Timings
from services.trainer.model.engine import Engine
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
    """What an objective is made of, for one training step."""

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


def velocity(engine: Engine, latents: Tensor, timestep: Tensor, batch: FlowBatch) -> Tensor:
    """(B, *latent) float32 of the active policy, guided as the rollout's: it is the guided model that samples."""
    rollout = engine.spec.rollout
    engine.ranks.beats.beat()
    predicted: Tensor = engine.adapter.velocity(
        latents, timestep, batch.prompts, size=rollout.size, guidance=rollout.guidance, negative=batch.negative
    )
    return predicted


def stored_step(engine: Engine, batch: StepsBatch, k: int, step: int) -> StepResult:
    """Evaluates the k-th stored step, denoising step `step`, of the active policy at the stored next latents."""
    noise, schedule = engine.spec.rollout.noise, engine.schedule
    return reverse_step(noise.type)(
        batch.latents[k],
        velocity(engine, batch.latents[k], schedule.timesteps[step], batch),
        schedule.sigmas[step],
        schedule.sigmas[step + 1],
        eta=noise.eta,
        sigma_max=schedule.sigma_max,
        prev_sample=batch.next_latents[k],
    )
