"""Counts what became of the samples of a chaos run, by identity. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample
from flowfleet.job.spec import JobSpec


@dataclass(frozen=True)
class Samples:
    """The end of a job's samples."""

    asked: int
    trained: int
    dropped: Mapping[str, int]
    """Reason → number."""
    doubled: int
    """Trained more often than there are identities."""
    lost: int
    """Neither trained nor dropped."""
    delivered_again: int
    """Came twice from the rollouts; the second one was ignored."""
    drops_injected: tuple[str, ...]
    """step/group/index of the samples whose reward was poisoned."""
    drops_found: tuple[str, ...]

    @property
    def are_exact(self) -> bool:
        return not self.doubled and not self.lost and set(self.drops_found) == set(self.drops_injected)


def account(
    spec: JobSpec,
    job: Job,
    records: Iterable[Sample],
    requests: Mapping[int, Sequence[str]],
    injected: tuple[str, ...],
) -> Samples:
    """Counts the samples of the steps that are done, by identity.

    `requests`: step → identities that the trainer was asked to train on. Where a step's request was not seen, the
    job's own records say which samples have a reward.
    """
    steps = range(job.progress.step)
    recorded: dict[int, list[str]] = {step: [] for step in steps}
    for one in records:
        if one.step in recorded and one.reward is not None and not one.drop_reason:
            recorded[one.step].append(f"{one.step}/{one.group}/{one.index}")
    trained = [name for step in steps for name in requests.get(step, recorded[step])]
    asked = [
        f"{step}/{group}/{index}"
        for step in steps
        for group in range(spec.rollout.prompts_per_step)
        for index in range(spec.rollout.group_size)
    ]
    dropped = job.results.get("samples_dropped") or job.progress.samples_dropped
    num_trained = job.results.get("samples_trained", job.progress.samples_trained)
    return Samples(
        asked=len(asked),
        trained=num_trained,
        dropped=dropped,
        doubled=max(num_trained, len(trained)) - len(set(trained)),
        lost=max(0, len(asked) - num_trained - sum(dropped.values())),
        delivered_again=job.results.get("duplicates", 0),
        drops_injected=injected,
        drops_found=tuple(sorted(set(asked) - set(trained))),
    )
