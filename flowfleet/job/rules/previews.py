"""Which settings go with previews that choose the samples of a group (`rollout.preview`): part of rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.job.rules.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def problems(job: JobSpec) -> Iterator[str]:
    """Problems of `rollout.preview`."""
    rollout, part = job.rollout, job.rollout.preview
    if part.keep is None:
        yield from unheard(
            job,
            ("rollout.preview.num_inference_steps", "rollout.preview.quantization"),
            "without rollout.preview.keep: give that too, or leave it out",
        )
        return
    setting = f"rollout.preview.keep = {part.keep}"
    if job.method.data == "preferences":
        yield f"{setting} has no effect with algorithm.name = {job.method.name}, which samples nothing: leave it out"
    if not job.loss.traits.reads_rewards:
        yield f"{setting} chooses by rewards, which algorithm.loss = {job.loss.name} does not train on: leave it out"
    if part.keep >= rollout.group_size:
        yield (
            f"{setting} leaves out no sample of a group of {rollout.group_size}: lower it, raise "
            "rollout.group_size, or leave it out"
        )
    steps, number = part.num_inference_steps, rollout.num_inference_steps
    if steps is not None and steps >= number:
        yield (
            f"rollout.preview.num_inference_steps = {steps} saves nothing: set it below "
            f"rollout.num_inference_steps = {number}, or leave it out"
        )
    elif steps is None and not rollout.previews_alone_in_fp8:
        yield (
            "rollout.preview makes every sample twice at the same cost: set rollout.preview.num_inference_steps below "
            f'rollout.num_inference_steps = {number}, or rollout.preview.quantization = "fp8"'
        )
    elif steps is not None and rollout.noise.share_initial_noise:
        yield (
            "rollout.noise.share_initial_noise makes all previews of a group the same, as they have no other noise: "
            "set it to false, or leave rollout.preview out"
        )
    yield from _quantization(job)
    if job.trainer.deterministic and job.loss.traits.has_step_ratio:
        yield (
            "trainer.deterministic repeats the rollout's batches, of which rollout.preview leaves samples out: set "
            "trainer.deterministic = false, or leave rollout.preview out"
        )


def _quantization(job: JobSpec) -> Iterator[str]:
    setting = ("rollout.preview.quantization",)
    if job.rollout.quantization == "fp8":
        yield from unheard(job, setting, 'with rollout.quantization = "fp8", which previews have anyway: leave it out')
    elif job.model.base == "fp8":
        yield from unheard(job, setting, 'with model.base = "fp8", which previews compute with anyway: leave it out')
    elif job.rollout.previews_alone_in_fp8 and job.rollout.adapter == "merged":
        yield (
            'rollout.adapter = "merged" keeps one rounding of the weights, for previews and samples alike: set it to '
            '"separate", or leave rollout.preview.quantization out'
        )
