"""Rules of how a trainer holds, shares and updates weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.settings import AdvantageSettings, RatioSettings
from flowfleet.job.rules.unheard import is_changed, unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def adapter(job: JobSpec) -> Iterator[str]:
    """Checks where an adapter begins."""
    if job.model.adapter is not None and job.trainer.resume is not None:
        yield "model.adapter has no effect with trainer.resume, whose checkpoint has an adapter: leave one of them out"
    if job.trainer.mode == "lora":
        return
    if job.model.adapter is not None:
        yield (
            'model.adapter: trainer.mode = "full" has no adapter that could start from it: export the pipeline with '
            'the adapter merged in, with diffusers, and give that as model.path, or set trainer.mode = "lora"'
        )


def batches(job: JobSpec) -> Iterator[str]:
    """Checks updates and micro-batches against what a step trains on."""
    part = job.trainer
    number, what = job.trained_per_step, "samples"
    if job.loss.needs_pairs:
        number, what = number // 2, "pairs"
    elif job.loss.needs_groups:
        number, what = job.rollout.prompts_per_step, "groups"
    if number < part.updates_per_step and is_changed(job, "trainer.updates_per_step"):
        yield (
            f"trainer.updates_per_step = {part.updates_per_step} is more than the {number} {what} that a step trains "
            "on; lower it or raise rollout.prompts_per_step"
        )
    if job.loss.needs_pairs and part.micro_batch_size < 2:
        yield f"trainer.micro_batch_size = 1 cannot hold a pair, which algorithm.loss = {job.loss.name} needs: give 2"
    if job.loss.needs_groups and part.micro_batch_size < (of_group := job.rollout.made_of_group):
        setting = "rollout.group_size" if of_group == job.rollout.group_size else "rollout.preview.keep"
        yield (
            f"trainer.micro_batch_size = {part.micro_batch_size} cannot hold a group, which algorithm.loss = "
            f"{job.loss.name} needs: raise it to {setting} = {of_group}, or lower that"
        )
    if (
        part.deterministic
        and job.loss.traits.has_step_ratio
        and job.algorithm.of(AdvantageSettings).best_of is not None
    ):
        yield (
            "trainer.deterministic repeats the rollout's batches, of which algorithm.best_of leaves samples out: set "
            "trainer.deterministic = false, or leave algorithm.best_of out"
        )
    if part.deterministic and part.compile:
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which compiled blocks do not: set "
            "trainer.compile or trainer.deterministic to false"
        )
    other = job.rollout.compile or job.rollout.quantization != part.quantization
    if part.deterministic and job.loss.traits.has_step_ratio and other:
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which compiled blocks and another "
            f'quantization do not allow: set rollout.compile = false and rollout.quantization = "{part.quantization}", '
            "or trainer.deterministic = false"
        )


def sharding(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.sharding`."""
    if job.trainer.sharding == "replicate" and job.trainer.mode == "full":
        yield (
            'trainer.sharding = "replicate" with trainer.mode = "full" would keep gradients and moments of all weights '
            'on every rank: set it to "auto" or "fsdp"'
        )


def mesh(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.mesh`."""
    part, mesh = job.trainer, job.trainer.mesh
    replicate, setting = mesh.replicate or 1, f"trainer.mesh.sequence = {mesh.sequence}"
    if part.world_size % (replicate * mesh.degree):
        yield (
            f"trainer.mesh divides trainer.world_size = {part.world_size} by {replicate} copies and {mesh.degree} "
            "ranks a sample: choose numbers whose product divides it"
        )
    if mesh.sequence == 1:
        return
    if job.writes_tokens or job.trains_on_gradients:
        what = "sequences of tokens" if job.writes_tokens else "samples with gradients of rewards"
        yield f"{setting} cannot share {what}: set it to 1"
    if part.samples != "no":
        yield f'{setting} shares samples, which trainer.samples = "{part.samples}" makes on one rank: set it to "no"'
    if part.deterministic and job.loss.traits.has_step_ratio:
        yield (
            f"trainer.deterministic recomputes the rollout's log-probs bit for bit, which {setting} does not: set one "
            "of them to its default"
        )


def samples(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.samples`."""
    part = job.trainer
    setting = f'trainer.samples = "{part.samples}"'
    if part.samples == "no":
        return
    if part.mode == "full":
        yield (
            f"{setting} samples with the frozen base of an adapter, and full training has none: set trainer.mode "
            '= "lora", or trainer.samples = "no"'
        )
    if part.world_size > 1 and part.sharding == "fsdp":
        yield (
            f'{setting} needs the whole base on each rank, which trainer.sharding = "fsdp" shares out: set that to '
            '"auto", or trainer.samples = "no"'
        )
    if part.samples == "only" and job.schedule.max_staleness > 0:
        yield (
            f"{setting} is on-policy, and schedule.max_staleness = {job.schedule.max_staleness} is not: set that to 0, "
            'or trainer.samples = "idle"'
        )


def backend(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.backend`."""
    part = job.trainer
    setting = f'trainer.backend = "{part.backend}"'
    if part.backend == "fsdp":
        return
    if not job.writes_tokens:
        yield f"{setting} trains models that write text: leave it out"
    if part.quantization != "none" or job.model.base != "plain":
        yield f"{setting} has no float8: leave trainer.quantization and model.base out"
    if (part.mesh.replicate or 1) > 1:
        yield f"{setting} has one copy of the weights: leave trainer.mesh.replicate out"
    if part.compile:
        yield f"{setting} has kernels of its own: leave trainer.compile out"
    if part.samples != "no":
        yield f'{setting} does not sample: set trainer.samples = "no"'


def offload(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.offload`."""
    part = job.trainer
    setting = f'trainer.offload = "{part.offload}"'
    if part.offload == "none":
        return
    if part.mode == "full":
        yield f'{setting} is for an adapter: set trainer.mode = "lora", or trainer.optimizer.state = "host"'
    if part.sharding == "fsdp" and part.world_size > 1:
        yield f'{setting} needs an adapter that each rank holds whole: set trainer.sharding = "replicate"'
    if part.offload == "activations" and part.gradient_checkpointing != "full":
        yield f'{setting} moves what full checkpointing keeps: set trainer.gradient_checkpointing = "full"'
    if part.offloads("optimizer") and part.optimizer.state == "8bit":
        yield f"{setting} keeps both moments in host memory, in fp32: leave trainer.optimizer.state out"


def base(job: JobSpec) -> Iterator[str]:
    """Checks `model.base`."""
    if job.model.base == "plain":
        return
    if job.trainer.mode == "full":
        yield 'model.base = "fp8" is a frozen base: set trainer.mode = "lora", or leave model.base out'
    if job.model.dtype != "bfloat16":
        yield f'model.base = "fp8" works on models in bfloat16, not {job.model.dtype}: set model.dtype'
    if job.trainer.sharding == "fsdp" and job.trainer.world_size > 1:
        yield 'model.base = "fp8" is whole on every rank: set trainer.sharding to "auto" or "replicate"'
    if job.loss.traits.has_step_ratio and job.algorithm.of(RatioSettings).old_log_probs == "rollout":
        yield (
            'algorithm.old_log_probs = "rollout" with model.base = "fp8" would put an unmeasured gap into the ratio of '
            'the loss: set algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    yield from unheard(
        job, ("rollout.quantization",), 'with model.base = "fp8", which rollouts compute with anyway: leave it out'
    )


def quantization(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.quantization`."""
    setting = 'trainer.quantization = "fp8"'
    is_bypass = job.algorithm.of(RatioSettings).old_log_probs == "rollout"
    if job.trainer.quantization == "none":
        return
    if job.trainer.mode == "lora":
        yield f'{setting} is for full training: set model.base = "fp8" in its place, which LoRA computes with'
    if job.model.dtype != "bfloat16":
        yield f"{setting} works on models in bfloat16, not {job.model.dtype}: set model.dtype"
    if job.loss.traits.has_step_ratio and is_bypass and job.rollout.quantization == "none":
        yield (
            f'algorithm.old_log_probs = "rollout" with {setting} would put an unmeasured gap into the ratio of the '
            'loss: set algorithm.old_log_probs to "first_forward" or "recompute", or rollout.quantization to "fp8"'
        )


def merged(job: JobSpec) -> Iterator[str]:
    """Checks `rollout.adapter`."""
    if job.trainer.mode == "full":
        yield from unheard(job, ("rollout.adapter",), 'with trainer.mode = "full", which has no adapter: leave it out')
        return
    if job.rollout.adapter == "separate" or not job.loss.traits.has_step_ratio:
        return
    if job.algorithm.of(RatioSettings).old_log_probs == "rollout":
        yield (
            'algorithm.old_log_probs = "rollout" with rollout.adapter = "merged" would put an unmeasured gap into the '
            'ratio of the loss: set algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if job.trainer.deterministic:
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which a merged adapter does not "
            'allow: set rollout.adapter = "separate", or trainer.deterministic = false'
        )


def average(job: JobSpec) -> Iterator[str]:
    """Checks `trainer.ema`."""
    if not job.averages:
        yield from unheard(job, ("trainer.ema.every",), "without trainer.ema.decay: give that too, or leave it out")


def optimizer(job: JobSpec) -> Iterator[str]:
    """Checks the warm-up of the learning rate."""
    part = job.trainer.optimizer
    total = job.schedule.steps * job.most_updates_per_step
    if part.warmup_updates >= total and not job.is_evaluation:
        yield (
            f"trainer.optimizer.warmup_updates = {part.warmup_updates} is not below the {total} updates of the job: "
            "lower it, or raise schedule.steps"
        )


def whole_batches(job: JobSpec) -> Iterator[str]:
    """Warns of fewer updates than `trainer.updates_per_step` where a trainer repeats the rollout's batches whole."""
    part = job.trainer
    if job.is_evaluation or not (part.deterministic and job.records_steps):
        return
    whole, updates = _rollout_batches(job), part.updates_per_step
    if whole < updates:
        yield (
            f"trainer.updates_per_step = {updates}, and a step has {whole} of the rollout's batches, which "
            f"trainer.deterministic repeats whole: it makes so many updates. Lower trainer.micro_batch_size to "
            f"{max(1, job.trained_per_step // updates)} or less, or set trainer.deterministic = false"
        )


def _rollout_batches(job: JobSpec) -> int:
    """How many batches of the rollout, cut to micro-batches, a step has where none is dropped."""
    of_group, rows = job.rollout.made_of_group, job.trainer.micro_batch_size
    groups = job.groups_per_request
    full, rest = divmod(job.rollout.prompts_per_step, groups)
    return full * math.ceil(groups * of_group / rows) + math.ceil(rest * of_group / rows)
