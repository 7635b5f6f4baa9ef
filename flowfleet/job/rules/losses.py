"""Rules of a loss: its settings, the correction of its ratio, its pairs and advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.registry import LOSSES
from flowfleet.algorithms.settings import (
    AdvantageSettings,
    KlGateSettings,
    KlRewardSettings,
    NatsSettings,
    NoiseLevelSettings,
    PairSettings,
    RatioSettings,
)
from flowfleet.job.rules.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

LIMITS = ("clip_range", "clip_range_low", "clip_nats", "kl_threshold")
"""Settings of `algorithm` that bound how far an update goes from the old policy."""


def settings(job: JobSpec) -> Iterator[str]:
    """Checks what goes together among the settings of a loss."""
    if job.algorithm.of(NatsSettings).clip_nats is not None:
        yield from unheard(job, ("algorithm.clip_range",), "next to algorithm.clip_nats: remove one of them")
    if job.algorithm.reads("sigma_sampling"):
        yield from _noise_levels(job, job.algorithm.of(NoiseLevelSettings))
    yield from _kl(job)


def _noise_levels(job: JobSpec, part: NoiseLevelSettings) -> Iterator[str]:
    number = job.rollout.num_inference_steps
    if part.sigma_sampling != "schedule":
        if part.sigma_low >= part.sigma_high:
            yield f"algorithm.sigma_low = {part.sigma_low} must lie below algorithm.sigma_high = {part.sigma_high}"
        return
    yield from unheard(
        job,
        ("algorithm.sigma_low", "algorithm.sigma_high"),
        'with algorithm.sigma_sampling = "schedule", which has the sampler\'s levels: leave it out',
    )
    if part.num_noise_levels > number:
        yield (
            f"algorithm.num_noise_levels = {part.num_noise_levels} is more than the {number} levels that the sampler "
            "has: lower it, or choose another algorithm.sigma_sampling"
        )


def _kl(job: JobSpec) -> Iterator[str]:
    """Checks the gate and the reference of `algorithm.kl_coef`."""
    if job.kl.kl_coef == 0:
        yield from unheard(
            job,
            ("algorithm.kl_gate", "algorithm.kl_reference"),
            "without algorithm.kl_coef: give that a value above 0, or leave it out",
        )
    for name in job.algorithm.of(KlGateSettings).kl_gate.rewards:
        yield from _watching(job, "algorithm.kl_gate.rewards", name)
    if job.kl.kl_reference.moves and job.loss.needs_reference:
        yield (
            f"algorithm.kl_reference moves what algorithm.loss = {job.loss.name} prefers samples by: leave it out, or "
            "choose another loss"
        )


def _watching(job: JobSpec, setting: str, name: str) -> Iterator[str]:
    """Problems of a setting that names a reward which must not count itself."""
    if name not in job.rewards:
        yield f'{setting} names "{name}", which is no reward of the job: give [rewards.{name}] with weight = 0'
    elif job.rewards[name].has_influence:
        yield f"{setting} names rewards.{name}, which counts in the sum as well: set rewards.{name}.weight = 0"


def correction(job: JobSpec) -> Iterator[str]:
    """Checks `algorithm.correction` and where old log-probs come from."""
    loss, part = job.loss, job.algorithm.of(RatioSettings)
    mode = part.correction.mode
    if not loss.traits.has_ratio:
        yield from unheard(
            job,
            ("rollout.max_log_prob_gap",),
            f"with algorithm.loss = {loss.name}, which reads no log-probs: leave it out",
        )
        return
    if part.old_log_probs == "rollout" and loss.needs_old_mean:
        yield (
            f"algorithm.loss = {loss.name} needs the old policy's means, which rollouts do not store: set "
            'algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if loss.traits.has_step_ratio and mode != "none" and not job.step.is_gaussian:
        yield (
            f'algorithm.correction.mode = "{mode}" needs Gaussian log-probs, which rollout.noise.type = '
            f'"{job.rollout.noise.type}" has not: set it to "none", or choose another step'
        )
    if part.old_log_probs == "rollout" and part.correction.needs_all_rows:
        yield (
            'algorithm.correction.level = "sequence" needs the log-probs of all rows before the first update, which '
            'algorithm.old_log_probs = "rollout" saves: set that to "recompute", or leave algorithm.correction.level '
            "out"
        )
    silent: dict[str, tuple[str, ...]] = {"none": ("low", "high", "level"), "truncated": ("low",)}
    yield from unheard(
        job,
        tuple(f"algorithm.correction.{name}" for name in silent.get(mode, ())),
        f'with algorithm.correction.mode = "{mode}": leave it out, or choose a mode that reads it',
    )


def pairs(job: JobSpec) -> Iterator[str]:
    """Checks losses that learn from pairs."""
    if not job.loss.needs_pairs:
        if job.method.data == "preferences":
            yield f"algorithm.name = {job.method.name} learns from pairs: its loss must be one of {names(pairs=True)}"
        return
    size, pairs = job.rollout.made_of_group, job.algorithm.of(PairSettings).pairs_per_group
    if job.method.data == "preferences":
        if size != 2 or pairs != 1:
            yield (
                f"algorithm.name = {job.method.name} has one pair a prompt: leave rollout.group_size at 2 and "
                "algorithm.pairs_per_group at 1"
            )
    elif 2 * pairs > size:
        setting = "rollout.group_size" if size == job.rollout.group_size else "rollout.preview.keep"
        yield f"algorithm.pairs_per_group = {pairs} needs {setting} of at least {2 * pairs}, not {size}"


def advantages(job: JobSpec) -> Iterator[str]:
    """Checks how advantages are made, and what is dropped by them."""
    if not job.algorithm.reads("advantage_std"):
        return
    part = job.algorithm.of(AdvantageSettings)
    if job.rollout.group_size < 2:
        yield "rollout.group_size = 1 gives every sample the advantage 0, so nothing is learnt: set it to 2 or more"
    if part.diversity is not None:
        yield from _watching(job, "algorithm.diversity", part.diversity)
    if part.reward_combination == "normalized" and part.advantage_std == "none":
        yield (
            'algorithm.advantage_std = "none" has no effect with algorithm.reward_combination = "normalized", which '
            "divides by std twice: leave it out"
        )
    if part.reward_combination == "separate" and part.advantage_std == "none":
        yield (
            'algorithm.reward_combination = "separate" with algorithm.advantage_std = "none" is the weighted sum '
            'itself: set the one to "sum", or the other to "group" or "global"'
        )
    of_group = job.rollout.made_of_group
    if part.best_of is not None and part.best_of >= of_group:
        setting = "rollout.group_size" if of_group == job.rollout.group_size else "rollout.preview.keep"
        yield (
            f"algorithm.best_of = {part.best_of} leaves out no sample of a group of {of_group}: lower it, raise "
            f"{setting}, or leave it out"
        )


def kl_reward(job: JobSpec) -> Iterator[str]:
    """Checks `algorithm.kl_reward`."""
    if job.algorithm.of(KlRewardSettings).kl_reward == 0:
        return
    if job.method.data == "preferences":
        yield (
            f"algorithm.kl_reward has no effect with algorithm.name = {job.method.name}, which samples nothing: leave "
            "it out"
        )
    elif job.trainer.mode == "full":
        yield (
            'algorithm.kl_reward with trainer.mode = "full" would need a second copy of the weights in every rollout: '
            'set trainer.mode = "lora", or use algorithm.kl_coef, which the trainer measures'
        )
    elif job.rollout.noise.eta == 0:
        yield (
            "algorithm.kl_reward is measured at noisy steps, and rollout.noise.eta = 0 has none: give an eta above 0, "
            "or use algorithm.kl_coef"
        )
    if (combination := job.algorithm.of(AdvantageSettings).reward_combination) != "sum":
        yield (
            "algorithm.kl_reward is subtracted from the sum of the rewards, which algorithm.reward_combination = "
            f'"{combination}" does not form: set that to "sum", or use algorithm.kl_coef'
        )


def names(*, pairs: bool = False) -> str:
    """Names of the losses that take samples of any sampler, or of those that need pairs."""
    return ", ".join(
        sorted(loss.name for loss in LOSSES.values() if (loss.needs_pairs if pairs else loss.traits.takes_any_sampler))
    )
