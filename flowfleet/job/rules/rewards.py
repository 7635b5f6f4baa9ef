"""Rules of the rewards of a job, of its sources and of its validations."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

from flowfleet.algorithms.settings import AdvantageSettings, KlGateSettings

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

_VOTES = "human"
"""Name of the reward service that people's votes are for."""


def rewards(job: JobSpec) -> Iterator[str]:
    """Checks that rewards count, and what happens where one fails."""
    rewards = job.rewards
    is_scored = job.method.data == "prompts" and job.loss.traits.reads_rewards
    if (is_scored or job.data.is_validated) and not rewards:
        yield "rewards: name at least one reward service, for example [rewards.ocr]"
    for name in (name for name, part in rewards.items() if part.held_out_only):
        yield from _held_out_only(job, name)
    if job.method.data != "prompts" or not rewards:
        return
    if not job.is_evaluation and is_scored and not any(part.has_influence for part in rewards.values()):
        if any(part.weight for part in rewards.values()):
            yield "rewards.*.curve is 0 throughout, so nothing is learnt: give one of them a factor other than 0"
        else:
            yield "rewards.*.weight is 0 throughout, so nothing is learnt: give one of them a weight"
    for name, part in rewards.items():
        if part.on_failure == "skip" and part.gate is not None:
            yield (
                f'rewards.{name}.on_failure = "skip" would open its gate while the service is unreachable: set it to '
                '"pause" or "drop"'
            )
        if is_scored and part.on_failure == "skip" and part.has_influence and not _others_with_influence(job, name):
            yield (f'rewards.{name}.on_failure = "skip" leaves no reward to continue with: set it to "pause" or "drop"')
        if part.clip is not None and not part.has_influence:
            yield f"rewards.{name}.clip has no effect with a weight of 0: leave it out"


def _held_out_only(job: JobSpec, name: str) -> Iterator[str]:
    part, setting = job.rewards[name], f"rewards.{name}.held_out_only"
    if part.has_influence or part.gate is not None:
        yield (
            f"{setting} leaves it no training sample to count for: set its weight to 0 and leave its gate out, or set "
            "this to false"
        )
    if not any(name in job.data.scoring(source.name, job.rewards) for source in job.data.held_out):
        yield f"{setting} leaves it nothing to score: give data.validation, or leave it out"
    if name in (*job.algorithm.of(KlGateSettings).kl_gate.rewards, job.algorithm.of(AdvantageSettings).diversity):
        yield f"{setting}: the algorithm reads {name} of training samples: leave it out"


def _others_with_influence(job: JobSpec, name: str) -> bool:
    """Returns whether every source that a reward scores has another reward that counts."""
    parts = [job.data.scoring(source.name, job.rewards) for source in job.data.each]
    return all(
        any(part.has_influence for other, part in rewards.items() if other != name)
        for rewards in parts
        if name in rewards
    )


def sources(job: JobSpec) -> Iterator[str]:
    """Checks the rewards of each source of prompts."""
    known = ", ".join(sorted(job.rewards)) or "none"
    for number, source in enumerate(job.data.sources):
        setting = f"data.sources.{number}.rewards"
        if source.rewards is None:
            continue
        if job.method.data != "prompts":
            yield f"{setting} has no effect with algorithm.name = {job.method.name}, whose data say what is better"
            continue
        if unknown := sorted(source.rewards.keys() - job.rewards.keys()):
            yield f"{setting}.{unknown[0]}: the job has no such reward; it has: {known}"
        elif job.loss.traits.reads_rewards and not any(
            part.has_influence for part in job.data.scoring(source.name, job.rewards).values()
        ):
            yield f"{setting} has no weight throughout, so its samples teach nothing: name a reward that has one"
    if job.data.sources and all(source.rewards is not None for source in job.data.sources):
        used = {name for source in job.data.sources for name in source.rewards or ()}
        if unused := sorted(job.rewards.keys() - used):
            yield f"rewards.{unused[0]} scores no source: name it in data.sources.N.rewards, or leave it out"


def best(job: JobSpec) -> Iterator[str]:
    """Checks `schedule.keep_best`."""
    schedule = job.schedule
    if not schedule.keep_best:
        return
    if not job.data.is_validated:
        yield "schedule.keep_best compares held-out rewards: give data.validation, or leave it out"
    elif lcm(schedule.save_every, schedule.validate_every) >= schedule.steps:
        yield (
            f"schedule.keep_best has nothing to compare: no step below schedule.steps = {schedule.steps} is both saved "
            f"and validated; set schedule.validate_every to schedule.save_every = {schedule.save_every}"
        )
    yield from _compared(job, "schedule.keep_best")


def validation_limits(job: JobSpec) -> Iterator[str]:
    """Checks `schedule.max_disagreement` and `schedule.max_reward_drop`."""
    for name in ("max_disagreement", "max_reward_drop"):
        if getattr(job.schedule, name) is None:
            continue
        if not job.data.is_validated or job.is_evaluation:
            yield (
                f"schedule.{name} compares validations while a job trains: give data.validation and a schedule.steps "
                "above 0, or leave it out"
            )
        elif name == "max_disagreement" and all(part.has_influence for part in job.rewards.values()):
            yield (
                "schedule.max_disagreement has nothing to compare the job's reward with: give it a reward to watch, "
                "with weight = 0, or leave it out"
            )
        elif name == "max_reward_drop" and not any(part.has_influence for part in job.rewards.values()):
            yield "schedule.max_reward_drop has no reward to compare: give one a weight above 0, or leave it out"
        yield from _compared(job, f"schedule.{name}")


def _compared(job: JobSpec, setting: str) -> Iterator[str]:
    """Checks that totals count the same at all steps, for a setting that compares them."""
    for name, part in job.rewards.items():
        if part.weight and len({factor for _, factor in part.curve}) > 1:
            yield (
                f"{setting} compares the rewards of different steps, and rewards.{name}.curve changes what they count: "
                "leave one of them out"
            )


def lone_votes(job: JobSpec) -> Iterator[str]:
    """Warns where nothing but people's votes holds the policy."""
    votes = [name for name, part in job.rewards.items() if part.service_of(name) == _VOTES]
    others = [part for name, part in job.rewards.items() if name not in votes]
    if votes and not job.kl.kl_coef and not any(part.gate or part.has_influence for part in others):
        yield (
            f"rewards.{votes[0]}: people's votes are the only guard of this job: add a reward with a gate, such as "
            "image_quality, or set algorithm.kl_coef"
        )
