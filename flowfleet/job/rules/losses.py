"""What goes with a loss: its settings, the correction of its ratio, its pairs and advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.registry import LOSSES
from flowfleet.job.rules.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

_NATS = {"clip_range": "clip_nats", "clip_range_low": "clip_nats_low", "kl_threshold": "kl_threshold_nats"}
"""Limits to the same ones in nats, which replace them."""


LIMITS = (*_NATS, *_NATS.values())
"""Settings of `algorithm` that bound how far an update goes from the old policy."""


def settings(job: JobSpec) -> Iterator[str]:
    """Checks the settings that only some losses read, and their ranges."""
    part, loss = job.algorithm, job.loss
    special = {name for known in LOSSES.values() for name in known.reads}
    for name in sorted(special - set(loss.reads)):
        readers = ", ".join(_readers(job, name))
        yield from unheard(
            job, (f"algorithm.{name}",), f"with algorithm.loss = {loss.name}: leave it out, or use {readers}"
        )
    if loss.kind != "policy":
        yield from unheard(
            job,
            ("algorithm.step_weights",),
            f"with algorithm.loss = {loss.name}, which is no policy loss: leave it out",
        )
    for name, greatest in sorted(loss.at_most.items()):
        value = getattr(part, name)
        if value > greatest:
            yield f"algorithm.{name} = {value} must be at most {greatest} with algorithm.loss = {loss.name}"
    for plain, nats in _NATS.items():
        if nats in loss.reads and getattr(part, nats) is not None:
            yield from unheard(job, (f"algorithm.{plain}",), f"next to algorithm.{nats}: remove one of them")
    if "sigma_sampling" in loss.reads and part.sigma_sampling == "schedule":
        yield from unheard(
            job,
            ("algorithm.sigma_low", "algorithm.sigma_high"),
            'with algorithm.sigma_sampling = "schedule", which has the sampler\'s levels: leave it out',
        )
        if part.num_noise_levels > job.rollout.num_inference_steps:
            yield (
                f"algorithm.num_noise_levels = {part.num_noise_levels} is more than the "
                f"{job.rollout.num_inference_steps} levels that the sampler has: lower it, or choose another "
                "algorithm.sigma_sampling"
            )
    elif "sigma_low" in loss.reads and part.sigma_low >= part.sigma_high:
        yield f"algorithm.sigma_low = {part.sigma_low} must lie below algorithm.sigma_high = {part.sigma_high}"
    if part.kl_coef == 0 or not loss.takes_kl:
        yield from unheard(
            job,
            ("algorithm.kl_gate", "algorithm.kl_reference"),
            "without algorithm.kl_coef: give that a value above 0 and a loss that reads it, or leave it out",
        )
    if part.kl_gate.rewards and loss.kind == "sequence":
        yield f"algorithm.kl_gate has no effect with algorithm.loss = {loss.name}: leave it out"
    for name in part.kl_gate.rewards:
        yield from _watching(job, "algorithm.kl_gate.rewards", name)
    if part.kl_reference.moves and loss.needs_reference:
        yield (
            f"algorithm.kl_reference moves what algorithm.loss = {loss.name} prefers samples by: leave it out, or "
            "choose another loss"
        )
    if part.kl_coef > 0 and not loss.takes_kl:
        yield f"algorithm.kl_coef has no effect with algorithm.loss = {loss.name}, which holds to the reference by beta"


def replaced(job: JobSpec) -> set[str]:
    """Limits that the same ones in nats replace."""
    return {plain for plain, nats in _NATS.items() if getattr(job.algorithm, nats) is not None}


def _watching(job: JobSpec, setting: str, name: str) -> Iterator[str]:
    """Problems of a setting that names a reward which must not count itself."""
    if name not in job.rewards:
        yield f'{setting} names "{name}", which is no reward of the job: give [rewards.{name}] with weight = 0'
    elif job.rewards[name].has_influence:
        yield f"{setting} names rewards.{name}, which counts in the sum as well: set rewards.{name}.weight = 0"


def correction(job: JobSpec) -> Iterator[str]:
    """Checks `algorithm.correction` and where old log-probs come from."""
    part, loss, mode = job.algorithm, job.loss, job.algorithm.correction.mode
    if not loss.reads_log_probs:
        if mode != "none":
            yield (
                f'algorithm.correction.mode = "{mode}" corrects ratios, and algorithm.loss = {loss.name} has none: it '
                'takes samples of any sampler as they are; set it to "none"'
            )
        yield from unheard(
            job,
            ("algorithm.old_log_probs", "rollout.max_log_prob_gap"),
            f"with algorithm.loss = {loss.name}, which reads no log-probs: leave it out",
        )
    elif part.old_log_probs == "rollout" and loss.needs_old_mean:
        yield (
            f"algorithm.loss = {loss.name} needs the old policy's means, which rollouts do not store: set "
            'algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if loss.kind == "policy" and mode != "none" and not job.step.is_gaussian:
        yield (
            f'algorithm.correction.mode = "{mode}" needs Gaussian log-probs, which rollout.noise.type = '
            f'"{job.rollout.noise.type}" has not: set it to "none", or choose another step'
        )
    if part.old_log_probs == "rollout" and part.correction.joint and mode in ("truncated", "band"):
        yield (
            f'algorithm.correction.mode = "{mode}" with joint = true weighs by a ratio that the loss does not hold '
            'when algorithm.old_log_probs = "rollout": set joint to false, mode to "rejection", or old_log_probs to '
            '"recompute"'
        )
    rejecting = ("reject_low", "reject_high")
    silent = {
        "none": ("low", "high", "joint", "level", "normalize", *rejecting),
        "truncated": ("low",),
        "band": rejecting,
        "rejection": rejecting,
    }[mode]
    if part.old_log_probs == "rollout" and part.correction.needs_all_rows:
        name = "level" if part.correction.level == "sequence" else "normalize"
        yield (
            f'algorithm.correction.{name} = "{getattr(part.correction, name)}" needs the log-probs of all rows before '
            'the first update, which algorithm.old_log_probs = "rollout" saves: set that to "recompute", or leave '
            f"algorithm.correction.{name} out"
        )
    yield from unheard(
        job,
        tuple(f"algorithm.correction.{name}" for name in silent),
        f'with algorithm.correction.mode = "{mode}": leave it out, or choose a mode that reads it',
    )


def pairs(job: JobSpec) -> Iterator[str]:
    """Checks losses that learn from pairs."""
    if not job.loss.needs_pairs:
        if job.method.data == "preferences":
            yield f"algorithm.name = {job.method.name} learns from pairs: its loss must be one of {names(pairs=True)}"
        return
    size, pairs = job.rollout.made_of_group, job.algorithm.pairs_per_group
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
    part, loss = job.algorithm, job.loss
    if loss.needs_pairs:
        yield from unheard(
            job,
            (
                "algorithm.advantage_std",
                "algorithm.advantage_clamp",
                "algorithm.reward_combination",
                "algorithm.best_of",
                "algorithm.diversity",
            ),
            f"with algorithm.loss = {loss.name}, whose pairs go by the weighted sum of the rewards: leave it out",
        )
    elif job.rollout.group_size < 2 and loss.reads_rewards and not job.trains_on_gradients:
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
    if not loss.needs_pairs and part.best_of is not None and part.best_of >= of_group:
        setting = "rollout.group_size" if of_group == job.rollout.group_size else "rollout.preview.keep"
        yield (
            f"algorithm.best_of = {part.best_of} leaves out no sample of a group of {of_group}: lower it, raise "
            f"{setting}, or leave it out"
        )


def kl_reward(job: JobSpec) -> Iterator[str]:
    """Checks `algorithm.kl_reward`."""
    part = job.algorithm
    if part.kl_reward == 0:
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
    if part.reward_combination != "sum":
        yield (
            "algorithm.kl_reward is subtracted from the sum of the rewards, which algorithm.reward_combination = "
            f'"{part.reward_combination}" does not form: set that to "sum", or use algorithm.kl_coef'
        )


def _readers(job: JobSpec, name: str) -> list[str]:
    """Losses that read a setting, those for the job's kind of policy if there are any."""
    readers = [loss for loss in LOSSES.values() if name in loss.reads]
    suited = [loss for loss in readers if (loss.kind == "sequence") == job.writes_tokens]
    return sorted(loss.name for loss in suited or readers)


def names(*, kind: str | None = None, pairs: bool = False) -> str:
    """Names of the losses of a kind, or of those that need pairs."""
    return ", ".join(
        sorted(loss.name for loss in LOSSES.values() if kind in (None, loss.kind) and (loss.needs_pairs or not pairs))
    )
