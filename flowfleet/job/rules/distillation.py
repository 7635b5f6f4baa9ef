"""Which settings go with a policy that learns from teachers: part of rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def problems(job: JobSpec) -> Iterator[str]:
    """Problems of the teachers."""
    if job.loss.traits.reads_rewards:
        return
    loss = job.loss.name
    if not job.teachers:
        yield (
            f"algorithm.loss = {loss} learns from teachers: name the adapter of one as "
            "algorithm.teachers.NAME.adapter, for example job:ID"
        )
    if job.trainer.mode == "full":
        yield (
            f"algorithm.loss = {loss} compares adapters on one frozen base, which full training changes: set "
            'trainer.mode = "lora"'
        )
    if job.rollout.noise.eta == 0:
        yield (
            f"rollout.noise.eta = 0 stores no steps, which algorithm.loss = {loss} compares with a teacher's: give an "
            "eta above 0"
        )
    yield from _routes(job)


def _routes(job: JobSpec) -> Iterator[str]:
    """Each source of prompts needs one teacher."""
    names = [source.name for source in job.data.each]
    taught: dict[str, list[str]] = {name: [] for name in names}
    for teacher, part in job.teachers.items():
        setting = f"algorithm.teachers.{teacher}.sources"
        for name in part.sources:
            if name not in taught or not job.data.sources:
                known = ", ".join(name for name in names if name) or "none"
                yield f"{setting}: the job has no source of prompts named {name!r}; it has: {known}"
        for name in part.sources or names:
            taught.setdefault(name, []).append(teacher)
    for name in names:
        source = f"the source {name!r}" if name else "data.train"
        if len(taught[name]) > 1:
            both = " and ".join(taught[name][:2])
            advice = "" if job.data.sources else "make its prompts several [[data.sources]] and "
            yield (
                f"algorithm.teachers {both} both teach the prompts of {source}, which takes one: {advice}name the "
                f"sources of each in algorithm.teachers.{taught[name][1]}.sources"
            )
        elif job.teachers and not taught[name]:
            yield f"algorithm.teachers: no teacher has the prompts of {source}: name it in the `sources` of a teacher"
