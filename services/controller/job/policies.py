"""Requests of a job to rollouts, by the kind of its policy: a flow, or a model that writes text. Pure.

`requests.py` completes them, the same for both.
"""

from typing import Protocol

from flowfleet.algorithms.sequences.overlong import overlong_penalty
from flowfleet.algorithms.settings import KlRewardSettings, LengthSettings
from flowfleet.algorithms.windows import noisy_steps, trained_steps
from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2

OVERLONG = "/overlong"
"""Name of a text's length penalty among its scores; no reward can have this name."""

Fact = tuple[str, object, object]
"""Property's name, its value in a sample, and the requested value."""


class Policy(Protocol):
    """Requests to rollouts, and checks of their samples, for one kind of policy."""

    def trained(self, spec: JobSpec, step: int) -> rollout_pb2.GenerateRequest:
        """How training samples of a step are drawn and what is kept of them; the rest is left empty."""

    def validated(self, spec: JobSpec) -> rollout_pb2.GenerateRequest:
        """How held-out samples are drawn."""

    def facts(self, spec: JobSpec, sample: common_pb2.Sample, prompt: Prompt | None) -> list[Fact]:
        """Lists what a training sample of a prompt must be like."""

    def costs(self, spec: JobSpec, sample: common_pb2.Sample) -> dict[str, float]:
        """Returns what is kept among a sample's scores besides those of its rewards."""


class FlowPolicy:
    """See `Policy`. Noise enters at some steps of a schedule."""

    def trained(self, spec: JobSpec, step: int) -> rollout_pb2.GenerateRequest:
        noise = spec.rollout.noise
        return rollout_pb2.GenerateRequest(
            sampling=self._sampling(spec, spec.rollout.size, spec.rollout.num_inference_steps, spec.rollout.sampler),
            noise=rollout_pb2.Noise(
                step_type=noise.type,
                eta=noise.eta,
                sde_steps=noisy_steps(spec, step),
                recorded_steps=trained_steps(spec, step),
                share_initial_noise=noise.share_initial_noise,
                tail_steps=spec.rollout.tail_steps or 0,
            ),
            record=common_pb2.RECORD_STEPS if spec.records_steps else common_pb2.RECORD_FINAL,
            reference_kl=spec.algorithm.of(KlRewardSettings).kl_reward > 0,
        )

    def validated(self, spec: JobSpec) -> rollout_pb2.GenerateRequest:
        steps = spec.schedule.validation_steps or spec.rollout.num_inference_steps
        sampler = spec.schedule.validation_sampler or spec.rollout.sampler
        return rollout_pb2.GenerateRequest(
            sampling=self._sampling(spec, spec.validation_size, steps, sampler),
            noise=rollout_pb2.Noise(step_type=spec.rollout.noise.type, eta=0.0),
        )

    def facts(self, spec: JobSpec, sample: common_pb2.Sample, prompt: Prompt | None) -> list[Fact]:
        rollout, size = spec.rollout, spec.rollout.size_of(prompt.size if prompt else None)
        facts: list[Fact] = [("height", sample.height, size.height), ("width", sample.width, size.width)]
        if spec.records_steps:
            facts.append(("noisy steps", [*sample.sde_steps], [*trained_steps(spec, sample.id.step)]))
        if spec.method.data == "prompts":
            facts.append(("number of frames", sample.num_frames, rollout.num_frames))
        return facts

    def costs(self, spec: JobSpec, sample: common_pb2.Sample) -> dict[str, float]:
        return {}

    def _sampling(self, spec: JobSpec, size: Size, num_inference_steps: int, sampler: str) -> rollout_pb2.Sampling:
        return rollout_pb2.Sampling(
            height=size.height,
            width=size.width,
            num_inference_steps=num_inference_steps,
            guidance_scale=spec.rollout.guidance_scale,
            negative_prompt=spec.rollout.negative_prompt,
            num_frames=spec.rollout.num_frames,
            embedded_guidance=spec.rollout.embedded_guidance,
            guidance_low=spec.rollout.guidance_interval[0] or None,
            guidance_high=_unless(1.0, spec.rollout.guidance_interval[1]),
            image_guidance_scale=spec.rollout.image_guidance_scale,
            guidance_renorm=spec.rollout.guidance_renorm or "",
            condition_pixels=spec.rollout.condition_pixels or 0,
            sampler="" if sampler == "euler" else sampler,
            shift=spec.rollout.shift,
            full_precision=spec.rollout.previews_alone_in_fp8,
            sound_share=spec.rollout.sound_share,
        )


def _unless(usual: float, value: float) -> float | None:
    return None if value == usual else value


class SequencePolicy:
    """See `Policy`. Tokens are drawn one after the other."""

    def trained(self, spec: JobSpec, step: int) -> rollout_pb2.GenerateRequest:
        part = spec.rollout.sequence
        sampling = self._sampling(spec, part.temperature)
        sampling.sequence.routed_experts = part.routed_experts
        return rollout_pb2.GenerateRequest(sampling=sampling, record=common_pb2.RECORD_TOKENS)

    def validated(self, spec: JobSpec) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(sampling=self._sampling(spec, spec.rollout.sequence.validation_temperature))

    def facts(self, spec: JobSpec, sample: common_pb2.Sample, prompt: Prompt | None) -> list[Fact]:
        """Lengths are within limits, since the trainer packs by them."""
        part = spec.rollout.sequence
        return [
            ("number of tokens", sample.num_tokens, min(max(sample.num_tokens, 1), part.max_tokens)),
            ("number of prompt tokens", sample.prompt_tokens, self._allowed(sample.prompt_tokens, spec)),
            ("media type", sample.media_type, "text/plain"),
        ]

    def costs(self, spec: JobSpec, sample: common_pb2.Sample) -> dict[str, float]:
        share = spec.algorithm.of(LengthSettings).overlong_share
        penalty = overlong_penalty(sample.num_tokens, spec.rollout.sequence.max_tokens, share)
        return {OVERLONG: penalty} if share else {}

    def _allowed(self, num_tokens: int, spec: JobSpec) -> int:
        most = spec.rollout.sequence.max_prompt_tokens
        return max(1, num_tokens if most is None else min(num_tokens, most))

    def _sampling(self, spec: JobSpec, temperature: float) -> rollout_pb2.Sampling:
        part = spec.rollout.sequence
        return rollout_pb2.Sampling(
            sequence=rollout_pb2.SequenceSampling(
                max_tokens=part.max_tokens,
                temperature=temperature,
                top_p=1.0,
                stop=part.stop,
                max_prompt_tokens=part.max_prompt_tokens or 0,
            )
        )


_FLOW, _SEQUENCE = FlowPolicy(), SequencePolicy()


def policy_of(spec: JobSpec) -> Policy:
    """The kind that the job's loss trains."""
    return _SEQUENCE if spec.writes_tokens else _FLOW
