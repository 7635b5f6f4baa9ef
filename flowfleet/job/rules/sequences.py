"""Which settings go with a policy that writes tokens, and which with a flow: part of rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Loss
from flowfleet.algorithms.settings import AdvantageSettings, LengthSettings, RatioSettings
from flowfleet.job.rules.unheard import unheard
from flowfleet.job.sampling import RolloutPart
from flowfleet.job.sequence import SequencePart

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec
    from flowfleet.models.registry import ModelFamily

_OF_SEQUENCES = (
    *(f"rollout.sequence.{name}" for name in SequencePart.model_fields if name != "routed_experts"),
    "trainer.micro_batch_tokens",
)
"""Settings that only policies that write tokens read. A flow may have `routed_experts` off: stored jobs say so."""
_NESTED_OF_FLOWS = ("noise", "window", "preview")
_OF_BOTH = ("pool", "prompts_per_step", "group_size", "batch_size", "max_log_prob_gap", "max_refills", "sequence")
_OF_FLOWS = (
    *(f"rollout.{name}" for name in RolloutPart.model_fields if name not in (*_OF_BOTH, *_NESTED_OF_FLOWS)),
    "schedule.validation_steps",
    "schedule.validation_sampler",
    "schedule.validation_height",
    "schedule.validation_width",
    "trainer.micro_batch_size",
)
"""Settings that only flows read."""


def problems(job: JobSpec) -> Iterator[str]:
    """Finds settings of the other kind of policy."""
    loss = job.loss.name
    if not job.writes_tokens:
        known = ", ".join(sorted(other.name for other in LOSSES.values() if other.traits.writes_tokens))
        yield from unheard(
            job,
            _OF_SEQUENCES,
            f"with algorithm.loss = {loss}, which trains a flow: leave it out, or use {known} for a model that writes "
            "text",
        )
        return
    where = f"with algorithm.loss = {loss}, which trains a model that writes text: leave it out"
    nested = (
        f"rollout.{part}.{name}" for part in _NESTED_OF_FLOWS for name in type(getattr(job.rollout, part)).model_fields
    )
    yield from unheard(job, (*_OF_FLOWS, *nested), where)
    yield from _of_flows_alone(job)
    yield from _algorithm(job)


def refusal(family: ModelFamily, loss: Loss) -> str:
    """Why a loss cannot train a family; empty where it can."""
    if family.trains(writes_tokens=loss.traits.writes_tokens):
        return ""
    if family.writes_tokens:
        known = ", ".join(sorted(one.name for one in ALGORITHMS.values() if LOSSES[one.loss].traits.writes_tokens))
        return f"{family.title} writes text: choose algorithm.name from {known}"
    return f"{family.title} is a flow, and this algorithm trains models that write text: choose another algorithm.name"


def _of_flows_alone(job: JobSpec) -> Iterator[str]:
    if job.model.max_sequence_length is not None:
        yield (
            f"model.max_sequence_length has no effect with algorithm.loss = {job.loss.name}: use "
            "rollout.sequence.max_prompt_tokens and rollout.sequence.max_tokens"
        )
    if job.model.base != "plain":
        yield f'model.base = "{job.model.base}" is offered for flows alone: leave it out'
    part = job.trainer
    if part.quantization != "none":
        yield f'trainer.quantization = "{part.quantization}" is offered for flows alone: leave it out'
    if part.samples != "no":
        yield f'trainer.samples = "{part.samples}" is offered for flows alone: set trainer.samples = "no"'


def _algorithm(job: JobSpec) -> Iterator[str]:
    correction = job.algorithm.of(RatioSettings).correction
    combination = job.algorithm.of(AdvantageSettings).reward_combination
    if correction.mode != "none" and correction.level == "step" and job.loss.by_sequence:
        yield (
            f'algorithm.correction.level = "step" weighs tokens, and algorithm.loss = {job.loss.name} has one ratio a '
            'sequence: set it to "sequence"'
        )
    if job.algorithm.of(LengthSettings).overlong_share and combination != "sum":
        yield (
            "algorithm.overlong_share is subtracted from the sum of the rewards, which algorithm.reward_combination = "
            f'"{combination}" does not form: set that to "sum", or algorithm.overlong_share to 0'
        )
