"""Which settings of a job go with which others. Asked at submit, so that no trainer ever meets what cannot work.

`problems` refuses a job. `warnings` lets it run and is shown with it: what a published recipe may want all the same.

Each rule gives the problems of one part of a job: a sentence that begins with a setting and says what to change.
A setting that nothing listens to is a problem only if the job changed it: what schema, algorithm or loss gave is not
the user's doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.settings import RatioSettings
from flowfleet.job.rules import distillation, gradients, losses, previews, rewards, sampling, sequences, trainer

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def problems(job: JobSpec) -> Iterator[str]:
    """Everything that is wrong with a job's combination of settings, the plainest first."""
    for rule in (
        sequences.problems,
        gradients.problems,
        _evaluation,
        sampling.window,
        sampling.noise,
        sampling.sampler,
        sampling.guidance,
        losses.settings,
        sampling.sizes,
        distillation.problems,
        previews.problems,
        losses.correction,
        losses.pairs,
        losses.advantages,
        losses.kl_reward,
        trainer.adapter,
        rewards.rewards,
        rewards.sources,
        trainer.batches,
        trainer.sharding,
        trainer.mesh,
        trainer.backend,
        trainer.samples,
        trainer.offload,
        trainer.base,
        trainer.quantization,
        trainer.merged,
        trainer.average,
        trainer.optimizer,
        rewards.best,
        rewards.validation_limits,
    ):
        yield from rule(job)


def warnings(job: JobSpec) -> Iterator[str]:
    """Settings that are valid but probably not intended, one sentence each."""
    part = job.algorithm.of(RatioSettings)
    limits = {name: getattr(job.algorithm, name) for name in losses.LIMITS if job.algorithm.reads(name)}
    if limits.get("clip_nats") is not None:
        limits.pop("clip_range", None)
    idle = [name for name, value in limits.items() if value is not None]
    if job.loss.traits.has_ratio and job.most_updates_per_step == 1 and part.old_log_probs != "rollout" and idle:
        settings = " and ".join(f"algorithm.{name}" for name in idle)
        yield (
            f"{settings} {'have' if len(idle) > 1 else 'has'} no effect with one update a step, in which the policy is "
            "still the old one: set trainer.updates_per_step or trainer.passes to 2 or more"
        )
    yield from trainer.whole_batches(job)
    yield from _other_numerics(job)
    yield from rewards.lone_votes(job)


def _other_numerics(job: JobSpec) -> Iterator[str]:
    """Warns of samplers that compute another policy than the trainer, where the loss has a ratio to it. A loss without
    one takes samples of any sampler as they are."""
    rollout = job.rollout
    is_guarded = job.algorithm.of(RatioSettings).correction.mode != "none" or rollout.max_log_prob_gap is not None
    if not job.loss.traits.has_step_ratio or is_guarded:
        return
    trained = job.trainer.quantization
    for name, usual in (("quantization", trained), ("adapter", "separate")):
        if (value := getattr(rollout, name)) != usual:
            where = f' with trainer.quantization = "{trained}"' if usual == "fp8" else ""
            same = 'rollout.quantization = "fp8", ' if usual == "fp8" else ""
            yield (
                f'rollout.{name} = "{value}"{where} samples another policy than the one whose ratio algorithm.loss = '
                f"{job.loss.name} limits: set {same}algorithm.correction.mode or rollout.max_log_prob_gap, or choose a "
                f"loss that takes samples of any sampler: {losses.names()}"
            )


def _evaluation(job: JobSpec) -> Iterator[str]:
    if job.is_evaluation and not job.data.is_validated:
        yield (
            "schedule.steps = 0 evaluates held-out prompts, and data.validation names none: give it a prompt file, or "
            "raise schedule.steps to train"
        )
