"""Work of a training step: FLOPs to compute, bytes to send and to store."""

from __future__ import annotations

from dataclasses import dataclass

from flowfleet.algorithms.samplers import mean_model_calls
from flowfleet.algorithms.settings import KlRewardSettings, RatioSettings
from flowfleet.algorithms.windows import noisy_steps
from flowfleet.job.spec import JobSpec
from flowfleet.planning.facts import Facts
from flowfleet.planning.memory import checkpoint_bytes, item_bytes, passes
from flowfleet.planning.storage import FP32, num_rounds, trajectory_bytes


@dataclass(frozen=True)
class Work:
    """Work of one training step unless a field says otherwise; FLOPs are model FLOPs (flowfleet/planning/flops.py)."""

    samples: int
    """Samples that are drawn and scored."""
    trained: int
    """Samples that are trained on."""
    rollout_flops_per_sample: float
    """Denoising and decoding; with `rollout.preview` per candidate of a group, previews included."""
    train_flops_per_sample: float
    """Forwards and backwards, and the forwards without gradient for old log-probs and the reference."""
    published_bytes: int
    checkpoint_bytes: int
    """Size of one checkpoint."""
    gradient_bytes: int
    """Gradients of rewards on the checkpoints' disk, at most: of the steps that checkpoints do not cover yet."""
    trajectory_bytes: int
    """Latents and prompts in the blob store."""
    media_bytes: int
    """Pictures or videos, uncompressed: an upper bound of the files."""

    @property
    def flops(self) -> float:
        return self.samples * self.rollout_flops_per_sample + self.trained * self.train_flops_per_sample


def work(spec: JobSpec, facts: Facts, text_tokens: int) -> Work:
    """Computes the work of a step of a job whose prompts are `text_tokens` long."""
    rollout = spec.rollout
    sampling, training = facts.flops.sampling(text_tokens), facts.flops.training(text_tokens)
    size, calls, decodes = rollout.size, *_made(spec)
    return Work(
        samples=spec.samples_per_step,
        trained=spec.trained_per_step,
        rollout_flops_per_sample=calls * passes(spec) * sampling + decodes * facts.decode_flops,
        train_flops_per_sample=num_rounds(spec)
        * passes(spec)
        * (spec.trainer.passes * training + _without_gradient(spec) * sampling),
        published_bytes=facts.trained * item_bytes(spec),
        checkpoint_bytes=checkpoint_bytes(spec, facts),
        gradient_bytes=_gradient_bytes(spec, facts),
        trajectory_bytes=spec.samples_per_step * trajectory_bytes(spec, facts.latent)
        + rollout.prompts_per_step * facts.embeds_bytes,
        media_bytes=spec.samples_per_step * size.height * size.width * size.num_frames * 3,
    )


def _gradient_bytes(spec: JobSpec, facts: Facts) -> int:
    """A gradient by the latents for each row of the steps since the oldest checkpoint that is kept as one of the
    newest."""
    if not spec.trains_on_gradients:
        return 0
    steps = min(spec.schedule.steps, spec.schedule.keep_last * spec.schedule.save_every)
    return steps * spec.trained_per_step * num_rounds(spec) * facts.latent * FP32


def _made(spec: JobSpec) -> tuple[float, float]:
    """Model calls and decodings per candidate of a group: of the samples that are made in full, and of its preview. A
    sample's calls are also those of the reference that it is compared with."""
    rollout, share = spec.rollout, spec.rollout.made_of_group / spec.rollout.group_size
    compared = len(noisy_steps(spec, 0)) if spec.algorithm.of(KlRewardSettings).kl_reward else 0
    forwards = mean_model_calls(spec) + compared
    if rollout.preview.keep is None:
        return share * forwards, share
    return share * forwards + (rollout.preview.num_inference_steps or forwards), share + 1


def _without_gradient(spec: JobSpec) -> float:
    """Forwards per row besides those of the update: old log-probs of all updates but the first, and the reference. A
    matching loss has other rows in each pass."""
    count = float(spec.loss.needs_reference or spec.kl.kl_coef > 0) + float(spec.loss.keeps_old_policy)
    if spec.trains_on_gradients:
        return count + 1  # the images that rewards are asked about
    if not spec.records_steps:
        return count * spec.trainer.passes
    if not spec.loss.traits.has_ratio:
        return count + 1  # a row's teacher
    if spec.recomputes_all:
        count += 1
    elif spec.algorithm.of(RatioSettings).old_log_probs == "first_forward":
        count += 1 - 1 / spec.trainer.updates_per_step
    return count
