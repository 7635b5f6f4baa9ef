"""Rules of a loss that trains on the gradients of rewards. Asked at submit, as rules.py is.

Whether a reward gives gradients, its service alone knows: the controller asks it at submit. Where it does not answer
then, the job pauses at its first step and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.builtin.followed import SrpoSettings
from flowfleet.job.rules.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def problems(job: JobSpec) -> Iterator[str]:
    """Everything that is wrong with the combination of settings."""
    if not job.trains_on_gradients:
        return
    loss = job.loss.name
    yield from _rewards(job)
    if job.rollout.num_frames > 1:
        yield f"rollout.num_frames = {job.rollout.num_frames}: algorithm.loss = {loss} trains on pictures; set it to 1"
    if job.most_updates_per_step > 1:
        yield (
            f"algorithm.loss = {loss} takes one update a step, so that a reward that fails leaves the weights as they "
            "were: set trainer.updates_per_step = 1 and trainer.passes = 1, and raise rollout.prompts_per_step instead"
        )
    if job.loss.from_steps:
        yield from _late_steps(job)
    yield from _words(job, job.algorithm.of(SrpoSettings))


def _words(job: JobSpec, part: SrpoSettings) -> Iterator[str]:
    if part.negative_words and not part.positive_words:
        yield (
            "algorithm.negative_words without algorithm.positive_words wants the plain prompt more than one with such "
            "words: give positive words too, or leave both out"
        )
    if not part.negative_words:
        yield from unheard(
            job, ("algorithm.relative_weight",), "without algorithm.negative_words: leave it out, or give both words"
        )


def _rewards(job: JobSpec) -> Iterator[str]:
    loss = job.loss.name
    for name, part in job.rewards.items():
        if not part.has_influence:
            continue
        setting = f"rewards.{name}"
        if part.gate is not None:
            yield (
                f"{setting}.gate has no gradient, and algorithm.loss = {loss} follows that of {setting}: give the gate "
                "to a reward of weight 0, or leave it out"
            )
        if part.clip is not None:
            yield f"{setting}.clip cuts scores, not the gradient that algorithm.loss = {loss} follows: leave it out"
        if part.on_failure != "pause":
            yield (
                f'{setting}.on_failure = "{part.on_failure}": algorithm.loss = {loss} has nothing to follow without '
                f'the gradient of {setting}; set it to "pause"'
            )


def _late_steps(job: JobSpec) -> Iterator[str]:
    loss = job.loss.name
    if job.rollout.noise.eta > 0:
        yield (
            f"rollout.noise.eta = {job.rollout.noise.eta}: algorithm.loss = {loss} continues from the steps of an ODE; "
            "set it to 0"
        )
    if job.rollout.window.strategy == "fraction":
        yield (
            f'rollout.window.strategy = "fraction" is of noisy steps, which algorithm.loss = {loss} has none of: use '
            '"random"'
        )
