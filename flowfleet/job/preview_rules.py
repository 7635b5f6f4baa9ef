"""Which settings go with previews that choose the samples of a group (`rollout.preview`): part of rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.job.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def problems(job: JobSpec) -> Iterator[str]:
    """Problems of `rollout.preview`."""
    rollout, part = job.rollout, job.rollout.preview
    if part.keep is None:
        yield from unheard(
            job,
            ("rollout.preview.num_inference_steps",),
            "without rollout.preview.keep: give that too, or leave it out",
        )
        return
    setting = f"rollout.preview.keep = {part.keep}"
    if job.method.data == "preferences":
        yield f"{setting} has no effect with algorithm.name = {job.method.name}, which samples nothing: leave it out"
    if not job.loss.reads_rewards:
        yield f"{setting} chooses by rewards, which algorithm.loss = {job.loss.name} does not train on: leave it out"
    if part.keep >= rollout.group_size:
        yield (
            f"{setting} leaves out no sample of a group of {rollout.group_size}: lower it, raise "
            "rollout.group_size, or leave it out"
        )
    steps, number = part.num_inference_steps, rollout.num_inference_steps
    if steps is None or steps >= number:
        yield (
            f"rollout.preview makes every sample twice at the same cost: set rollout.preview.num_inference_steps below "
            f"rollout.num_inference_steps = {number}"
        )
    elif rollout.noise.share_initial_noise:
        yield (
            "rollout.noise.share_initial_noise makes all previews of a group the same, as they have no other noise: "
            "set it to false, or leave rollout.preview out"
        )
    if job.trainer.deterministic and job.loss.kind == "policy":
        yield (
            "trainer.deterministic repeats the rollout's batches, of which rollout.preview leaves samples out: set "
            "trainer.deterministic = false, or leave rollout.preview out"
        )
