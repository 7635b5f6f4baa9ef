"""Requests to rollouts and trainer, made from the job's spec. Pure but for reading the references of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from flowfleet.algorithms.windows import noisy_steps, trained_steps
from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import JobSpec
from flowfleet.limits import MAX_BLOB_BYTES
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2, trainer_pb2
from flowfleet.redis import keys
from flowfleet.seeds import derive_seed, sample_seed, validation_seed
from services.controller.job import events as ev
from services.controller.job.context import JobContext
from services.controller.job.credit import Credit
from services.controller.rewards.answers import MAX_SCORE
from services.controller.rewards.plane import SampleScore
from services.controller.store.sample_refs import SLICE

Part = Literal["trajectory", "prompt_embeds", "media", "negative_embeds"]
"""A blob of a training sample. Without guidance it has no negative embeds."""
PARTS: tuple[Part, ...] = get_args(Part)


def generate(job: JobContext, step: int, wanted: Mapping[int, Sequence[int]]) -> rollout_pb2.GenerateRequest:
    """Training samples of some groups: group → indices. Version and media are set later (step.py, inputs.py)."""
    prompts = job.prompts(step)
    return rollout_pb2.GenerateRequest(
        job_id=job.job_id,
        step=step,
        gives_way=job.spec.gives_way,
        purpose=common_pb2.PURPOSE_TRAIN,
        sampling=_sampling(job.spec, job.spec.rollout.num_inference_steps, job.spec.rollout.sampler),
        noise=rollout_pb2.Noise(
            step_type=job.spec.rollout.noise.type,
            eta=job.spec.rollout.noise.eta,
            sde_steps=noisy_steps(job.spec, step),
            recorded_steps=trained_steps(job.spec, step),
            share_initial_noise=job.spec.rollout.noise.share_initial_noise,
            tail_steps=job.spec.rollout.tail_steps or 0,
        ),
        record=common_pb2.RECORD_STEPS if job.spec.records_steps else common_pb2.RECORD_FINAL,
        reference_kl=job.spec.algorithm.kl_reward > 0,
        groups=[
            rollout_pb2.PromptGroup(
                group=group,
                prompt=prompts[group].text,
                indices=indices,
                seeds=[sample_seed(job.spec.seed, step, group, index) for index in indices],
                initial_seed=derive_seed(job.spec.seed, "initial", step, group),
                negative_prompt=prompts[group].negative,
            )
            for group, indices in wanted.items()
            if indices
        ],
    )


def validate(job: JobContext, version: int, start: int, prompts: Sequence[Prompt]) -> rollout_pb2.GenerateRequest:
    """Held-out prompts from number `start` on, all samples of each, without noise."""
    indices = range(job.spec.schedule.validation_samples)
    steps = job.spec.schedule.validation_steps or job.spec.rollout.num_inference_steps
    return rollout_pb2.GenerateRequest(
        job_id=job.job_id,
        step=version,
        purpose=common_pb2.PURPOSE_VALIDATE,
        policy_version=version,
        evaluated=job.spec.averages,
        sampling=_sampling(job.spec, steps, job.spec.schedule.validation_sampler or job.spec.rollout.sampler),
        noise=rollout_pb2.Noise(step_type=job.spec.rollout.noise.type, eta=0.0),
        groups=[
            rollout_pb2.PromptGroup(
                group=number,
                prompt=prompt.text,
                indices=indices,
                seeds=[validation_seed(job.spec.seed, number, index) for index in indices],
                negative_prompt=prompt.negative,
            )
            for number, prompt in enumerate(prompts, start)
        ],
    )


async def train_step(job: JobContext, step: int, credits: Sequence[Credit]) -> trainer_pb2.TrainStepRequest:
    """References of the samples that a step trains on and what each counts for, in their order; maybe of none."""
    request = trainer_pb2.TrainStepRequest(job_id=job.job_id, step=step)
    for start in range(0, len(credits), SLICE):
        part = credits[start : start + SLICE]
        samples = await job.refs.get(step, [(credit.group, credit.index) for credit in part])
        for sample, credit in zip(samples, part, strict=True):
            request.samples.add(sample=sample, advantage=credit.advantage, reward=credit.reward, pair=credit.pair)
    return request


def misfit(job: JobContext, sample: common_pb2.Sample) -> str:
    """What of a wanted training sample is not as `generate` asked for it; "" where all is. A rollout that is at fault,
    or hostile, may send anything, and the trainer fails a step that holds a sample of another job or size."""
    spec, place, rollout = job.spec, sample.id, job.spec.rollout
    if place.step >= job.machine.steps:
        return f"it is of step {place.step}, and the job has {job.machine.steps}"
    facts: list[tuple[str, object, object]] = [
        ("job", place.job_id, job.job_id),
        ("seed", sample.seed, sample_seed(spec.seed, place.step, place.group, place.index)),
        ("height", sample.height, rollout.height),
        ("width", sample.width, rollout.width),
    ]
    if spec.records_steps:
        facts.append(("noisy steps", [*sample.sde_steps], [*trained_steps(spec, place.step)]))
    if spec.method.data == "prompts":
        facts.append(("number of frames", sample.num_frames, rollout.num_frames))
    needed = PARTS if rollout.guidance.is_on else PARTS[:-1]
    absent = [part for part in needed if not sample.HasField(part)]
    own = job.blobs.uri(keys.blob(job.job_id))
    for part in PARTS:
        ref: common_pb2.BlobRef = getattr(sample, part)
        facts.append((part, ref.uri[: len(own)], own if sample.HasField(part) else ""))
        facts.append((f"{part}'s size", ref.size_bytes, min(ref.size_bytes, MAX_BLOB_BYTES)))
    wrong = [f"its {what} is {said}, asked for was {asked}" for what, said, asked in facts if said != asked]
    return "; ".join([*wrong, *(f"it has no {part}" for part in absent)])


def scored_or_dropped(sample: common_pb2.Sample, verdict: SampleScore) -> ev.Event:
    """The fact that a verdict tells of a sample. One whose KL is not finite cannot be compared with others."""
    step, group, index = sample.id.step, sample.id.group, sample.id.index
    if verdict.score is None:
        may_refill = not verdict.gated_by and not verdict.given_up
        return ev.Dropped(step=step, group=group, index=index, reason=verdict.reason, refill=may_refill)
    if not abs(sample.reference_kl) <= MAX_SCORE:
        return ev.Dropped(step=step, group=group, index=index, reason=DropReason.NON_FINITE_KL)
    return ev.Scored(
        step=step,
        group=group,
        index=index,
        score=verdict.score,
        scores=verdict.rewards,
        reference_kl=sample.reference_kl,
    )


def _sampling(spec: JobSpec, num_inference_steps: int, sampler: str) -> rollout_pb2.Sampling:
    return rollout_pb2.Sampling(
        height=spec.rollout.height,
        width=spec.rollout.width,
        num_inference_steps=num_inference_steps,
        guidance_scale=spec.rollout.guidance_scale,
        negative_prompt=spec.rollout.negative_prompt,
        num_frames=spec.rollout.num_frames,
        embedded_guidance=spec.rollout.embedded_guidance,
        condition_pixels=spec.rollout.condition_pixels or 0,
        sampler="" if sampler == "euler" else sampler,
        shift=spec.rollout.shift,
    )
