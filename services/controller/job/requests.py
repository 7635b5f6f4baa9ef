"""Requests to rollouts and trainer, made from the job's spec. Pure but for reading the references of samples."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import JobSpec
from flowfleet.limits import MAX_BLOB_BYTES
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2, trainer_pb2
from flowfleet.redis import keys
from flowfleet.rewards.requests import MAX_SCORE
from flowfleet.seeds import derive_seed, sample_seed, validation_seed
from services.controller.job.context import JobContext
from services.controller.job.credit import Credit
from services.controller.job.machine import events as ev
from services.controller.job.policies import policy_of
from services.controller.rewards import gradients
from services.controller.rewards.composition import weight_at
from services.controller.rewards.job_rewards import SampleScore
from services.controller.store.sample_refs import SLICE

Part = Literal["trajectory", "prompt_embeds", "media", "negative_embeds"]
"""A blob of a training sample. Without guidance it has no negative embeds."""
PARTS: tuple[Part, ...] = get_args(Part)


def generate(job: JobContext, step: int, wanted: Mapping[int, Sequence[int]]) -> rollout_pb2.GenerateRequest:
    """Training samples of some groups: group → indices. Version and media are set later (step.py, inputs.py)."""
    prompts = job.prompts(step)
    request = rollout_pb2.GenerateRequest(
        job_id=job.job_id,
        step=step,
        gives_way=job.spec.gives_way,
        purpose=common_pb2.PURPOSE_TRAIN,
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
    request.MergeFrom(policy_of(job.spec).trained(job.spec, step))
    return _sized(request, [prompts[group] for group in wanted])


def preview(job: JobContext, step: int, wanted: Mapping[int, Sequence[int]]) -> rollout_pb2.GenerateRequest:
    """Previews of training samples: the same seeds, on another schedule without noise, or on the same one with it."""
    request = generate(job, step, wanted)
    request.purpose, request.record, request.reference_kl = (
        common_pb2.PURPOSE_PREVIEW,
        common_pb2.RECORD_UNSPECIFIED,
        False,
    )
    request.sampling.full_precision = False
    num_steps = job.spec.rollout.preview.num_inference_steps
    if num_steps is not None:
        request.sampling.num_inference_steps = num_steps
        request.noise.CopyFrom(rollout_pb2.Noise(step_type=request.noise.step_type))
    return request


def validate(job: JobContext, version: int, start: int, prompts: Sequence[Prompt]) -> rollout_pb2.GenerateRequest:
    """Held-out prompts from number `start` on, all samples of each, without noise."""
    indices = range(job.spec.schedule.validation_samples)
    request = rollout_pb2.GenerateRequest(
        job_id=job.job_id,
        step=version,
        purpose=common_pb2.PURPOSE_VALIDATE,
        policy_version=version,
        evaluated=job.spec.averages,
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
    request.MergeFrom(policy_of(job.spec).validated(job.spec))
    return _sized(request, prompts)


def _sized(request: rollout_pb2.GenerateRequest, prompts: Sequence[Prompt]) -> rollout_pb2.GenerateRequest:
    """Sets the size that the prompts' lines say; all prompts of a request have one."""
    sizes = {prompt.size for prompt in prompts}
    assert len(sizes) <= 1, "see JobSpec.groups_per_request"
    for width, height in filter(None, sizes):
        request.sampling.width, request.sampling.height = width, height
    return request


async def train_step(job: JobContext, step: int, credits: Sequence[Credit]) -> trainer_pb2.TrainStepRequest:
    """References of the samples that a step trains on and what each counts for, in their order; maybe of none."""
    request = trainer_pb2.TrainStepRequest(job_id=job.job_id, step=step)
    for start in range(0, len(credits), SLICE):
        part = credits[start : start + SLICE]
        samples = await job.refs.get(step, [(credit.group, credit.index) for credit in part])
        for sample, credit in zip(samples, part, strict=True):
            request.samples.add(
                sample=sample,
                advantage=credit.advantage,
                reward=credit.reward,
                pair=credit.pair,
                without_kl=credit.without_kl,
                teacher=credit.teacher,
            )
    if job.spec.trains_on_gradients:
        rewards = job.machine.training_rewards_at(step)

        def weights(prompt: Prompt) -> dict[str, float]:
            return {name: weight_at(part, step) for name, part in job.rewards(prompt, step).items()}

        gradients.told(request, job.prompts(step), weights, rewards)
    return request


def misfit(job: JobContext, sample: common_pb2.Sample) -> str:
    """Says what of a wanted training sample differs from the request of `generate`; "" if nothing does. A faulty or
    hostile rollout may send anything, and the trainer fails a step that holds a sample of another job or size."""
    spec, place = job.spec, sample.id
    if place.step >= job.machine.steps:
        return f"it is of step {place.step}, and the job has {job.machine.steps}"
    facts: list[tuple[str, object, object]] = [
        ("job", place.job_id, job.job_id),
        ("seed", sample.seed, sample_seed(spec.seed, place.step, place.group, place.index)),
        *policy_of(spec).facts(spec, sample, _prompt_of(job, place)),
    ]
    needed = PARTS if spec.rollout.guidance.is_on else PARTS[:-1]
    absent = [part for part in needed if not sample.HasField(part)]
    own = job.blobs.uri(keys.blob(job.job_id))
    for part in PARTS:
        ref: common_pb2.BlobRef = getattr(sample, part)
        facts.append((part, ref.uri[: len(own)], own if sample.HasField(part) else ""))
        facts.append((f"{part}'s size", ref.size_bytes, min(ref.size_bytes, MAX_BLOB_BYTES)))
    wrong = [f"its {what} is {said}, asked for was {asked}" for what, said, asked in facts if said != asked]
    return "; ".join([*wrong, *(f"it has no {part}" for part in absent)])


def _prompt_of(job: JobContext, place: common_pb2.SampleId) -> Prompt | None:
    prompts = job.prompts(place.step) if place.step < job.machine.steps else ()
    return prompts[place.group] if place.group < len(prompts) else None


def scored_or_dropped(spec: JobSpec, sample: common_pb2.Sample, verdict: SampleScore) -> ev.Event:
    """The fact that a verdict tells of a sample. One whose KL is not finite cannot be compared with others."""
    step, group, index = sample.id.step, sample.id.group, sample.id.index
    if verdict.score is None:
        may_refill = not verdict.gated_by and not verdict.given_up
        reason, cause = verdict.reason, verdict.cause
        return ev.Dropped(step=step, group=group, index=index, reason=reason, cause=cause, refill=may_refill)
    if not abs(sample.reference_kl) <= MAX_SCORE:
        return ev.Dropped(step=step, group=group, index=index, reason=DropReason.NON_FINITE_KL)
    return ev.Scored(
        step=step,
        group=group,
        index=index,
        score=verdict.score,
        scores={**verdict.rewards, **policy_of(spec).costs(spec, sample)},
        reference_kl=sample.reference_kl,
    )
