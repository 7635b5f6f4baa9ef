"""From a model's facts to the memory of a trainer rank and of a rollout replica, part by part.

A trainer rank is at its fullest in one of two moments: at the start of the backward, when every activation is there, or
in the optimizer's step, when every gradient is. Memory outside tensors (CUDA's context, NCCL's buffers, gaps of the
allocator) comes on top: `RESERVE`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowfleet.hardware.graphs import MOST_ELEMENTS
from flowfleet.job.spec import JobSpec
from flowfleet.models.branches import LARGE
from flowfleet.planning.facts import Facts
from flowfleet.planning.replicas import STREAMED, keeps_encoder, replicates
from flowfleet.planning.storage import FP32, num_rounds

GIB = 2**30
RESERVE = 2 * GIB
"""Memory of a device that no tensor can use."""
MOMENTS = 2
BLOCK_8BIT = 256
"""Elements of an 8-bit moment that share one fp32 scale."""
HOST_SLOTS = 3
HOST_BUCKET, FAR_BUCKET = 2**26, 2**24
"""Elements of moments in host memory that are streamed through the device together, in so many slots; the second where
the weights are there as well."""
CHUNK_8BIT = 2**24
"""Elements of 8-bit moments that are decoded together."""
LEFT = 0.1
"""Share of blocks' inputs that is on the device at once where they are offloaded."""
IN_FLIGHT = 2
"""Blocks that FSDP2 holds gathered: the one at work, and the next."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one rank."""

    parts: dict[str, float]
    update_peak: float
    """In forwards and backwards."""
    optimizer_peak: float
    host: float
    """Memory of this rank's process."""
    sampling_peak: float = 0.0
    """While it samples for its own job; 0 where it never does."""
    gradient_peak: float = 0.0
    """While it decodes a picture with gradient; 0 where it never does."""

    @property
    def peak(self) -> float:
        return max(self.update_peak, self.optimizer_peak, self.sampling_peak, self.gradient_peak)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one replica."""

    parts: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def item_bytes(spec: JobSpec) -> int:
    return 4 if spec.model.dtype == "float32" else 2


def base_bytes(spec: JobSpec, facts: Facts) -> float:
    """The transformers, without an adapter: of an fp8 base large linears and experts have a byte an element, and layers
    with a table none."""
    if spec.model.base == "plain":
        return float(facts.params * item_bytes(spec))
    quantized = facts.fp8 + facts.fp8_experts
    return float((facts.params - facts.tabled - quantized) * item_bytes(spec) + quantized)


def passes(spec: JobSpec) -> int:
    """Branches of a row: two with classifier-free guidance."""
    return 2 if spec.rollout.guidance_scale > 1 else 1


def _forward(spec: JobSpec, facts: Facts, micro: int, *, is_whole: bool) -> tuple[int, int]:
    """Rows of a forward, and forwards before the backward: both branches of guidance may go in one where a rank holds
    all of the model and they are small."""
    if passes(spec) == 2 and is_whole and not spec.trainer.deterministic and micro * facts.latent < LARGE:
        return 2 * micro, 1
    return micro, passes(spec)


def trainer_memory(spec: JobSpec, facts: Facts, device_bytes: float | None = None) -> TrainerMemory:
    """Predicts memory for any `trainer` settings except mode, lora and compile, which `facts` were measured with.

    `device_bytes`: memory of a rank's device, which decides `trainer.sharding = "auto"`; None: the base fits.
    """
    part, item = spec.trainer, item_bytes(spec)
    is_lora = part.mode == "lora"
    is_whole = replicates(spec, base_bytes(spec, facts), device_bytes)
    mesh = part.mesh
    ranks = 1 if is_whole else part.world_size // (mesh.replicate or 1)
    samples = math.ceil(spec.trained_per_step * mesh.degree / part.world_size)
    micro = min(part.micro_batch_size, max(1, samples // part.updates_per_step))
    backwards = math.ceil(samples / part.updates_per_step / micro) * num_rounds(spec)
    forward = _forward(spec, facts, micro, is_whole=is_whole)
    is_far, on_host = part.offloads("optimizer"), part.offloads("optimizer") or part.optimizer.state == "host"
    moments = MOMENTS * facts.trained * _moment_bytes(spec) / ranks
    fp32 = FP32 * facts.trained / ranks
    near = 0.0 if is_far else 1.0
    gradients = FP32 * facts.trained / ranks
    held = base_bytes(spec, facts) / ranks, near * fp32
    free = None if device_bytes is None else device_bytes - sum(held)
    replica = _replica(spec, facts, free, device_bytes) if part.samples != "no" else {}
    parts = {
        "frozen base": held[0] if is_lora else 0.0,
        "masters": held[1],
        "optimizer state": 0.0 if on_host else moments,
        "gradients": gradients,
        "gradients, whole": (item if is_whole else FP32) * facts.trained if is_lora else 0.0,
        "gradients of graphs": float(item * facts.trained)
        if is_whole and _has_graphs(spec, forward[0] * facts.latent)
        else 0.0,
        "copy for the forward": float(facts.trained * item) if is_whole and (item < FP32 or is_far) else 0.0,
        "gathered": 0.0 if is_whole else (IN_FLIGHT * facts.block + facts.outside) * item,
        "gradients in flight": 0.0 if is_lora else IN_FLIGHT * facts.block * FP32,
        "reference": near * _reference(spec, facts) / ranks,
        "old policy": near * fp32 if spec.loss.keeps_old_policy else 0.0,
        "average": near * fp32 if spec.averages else 0.0,
        "teachers": near * fp32 * len(spec.teachers),
        "samples": min(2, part.passes) * samples * _row_bytes(spec, facts),
        "decoder": float(facts.vae_bytes) if spec.trains_on_gradients else 0.0,
        "rewards' gradients": samples * num_rounds(spec) * facts.latent * FP32 if spec.trains_on_gradients else 0.0,
        "as a replica": sum(size for name, size in replica.items() if name not in ("transformer", "activations")),
        "activations": facts.activations.peak(
            part.gradient_checkpointing, *forward, inputs_left=LEFT if part.offloads("activations") else 1.0
        )
        / mesh.degree,
    }
    only_late: tuple[str, ...] = ("gradients, whole",) if is_whole else ()  # when activations are freed already
    if backwards == 1 and not is_whole:
        only_late = ("gradients", "gradients, whole")
    kept = (
        *("reference", "old policy", "average", "teachers", "samples"),
        *("decoder", "rewards' gradients", "as a replica", "gradients of graphs"),
    )
    resident = ("frozen base", "masters", "copy for the forward", "optimizer state", "gradients", *kept)
    return TrainerMemory(
        parts={name: size for name, size in parts.items() if size},
        update_peak=sum(size for name, size in parts.items() if name not in only_late),
        optimizer_peak=sum(parts[name] for name in resident) + _streamed(spec, facts.trained / ranks),
        gradient_peak=sum(parts[name] for name in (*resident, "gathered")) + facts.gradient_bytes
        if spec.trains_on_gradients
        else 0.0,
        sampling_peak=sum(parts[name] for name in resident) + replica["activations"] if replica else 0.0,
        host=(moments if on_host else 0.0) + (fp32 if is_far else 0.0) + samples * _row_bytes(spec, facts),
    )


def rollout_memory(spec: JobSpec, facts: Facts, device_bytes: float | None = None) -> RolloutMemory:
    """Predicts memory with the transformer, text encoder and VAE on one device, as the diffusers engine places them.
    Nothing where the trainer alone samples. `device_bytes`: the device's, which decides where the text encoder lies;
    None: there."""
    free = None if device_bytes is None else device_bytes - base_bytes(spec, facts)
    parts = _replica(spec, facts, free, device_bytes) if spec.trainer.samples != "only" else {}
    return RolloutMemory({name: size for name, size in parts.items() if size})


def _replica(spec: JobSpec, facts: Facts, free: float | None, device_bytes: float | None) -> dict[str, float]:
    item, encoder = item_bytes(spec), float(facts.text_encoder_bytes)
    if free is None or device_bytes is None or keeps_encoder(free - RESERVE, encoder, device_bytes):
        kept, streamed = encoder, 0.0
    else:
        kept, streamed = 0.0, STREAMED * encoder
    return {
        "transformer": base_bytes(spec, facts),
        "adapter": float(facts.trained * item) if spec.trainer.mode == "lora" else 0.0,
        "text encoder": kept,
        "VAE": float(facts.vae_bytes),
        "merged weights": _merged_bytes(spec, facts) if spec.rollout.adapter == "merged" else 0.0,
        "fp8 copies": float(facts.fp8) if spec.rollout.has_fp8_copies else 0.0,
        "activations": float(max(facts.sampling_bytes, facts.decode_bytes, streamed)),
    }


def _merged_bytes(spec: JobSpec, facts: Facts) -> float:
    """Copies of the weights that have an adapter; of float8 ones, as large as those, a byte an element."""
    is_quantized = spec.model.base == "fp8" or spec.rollout.quantization == "fp8"
    quantized = min(facts.fp8, facts.merged_bytes // item_bytes(spec)) if is_quantized else 0
    return float(facts.merged_bytes - quantized * (item_bytes(spec) - 1))


def checkpoint_bytes(spec: JobSpec, facts: Facts) -> int:
    """Masters, both moments as they are kept, old policy, average and moving reference, over all ranks."""
    moves = spec.kl.kl_coef > 0 and spec.kl.kl_reference.moves
    each = FP32 + MOMENTS * _moment_bytes(spec) + FP32 * (spec.loss.keeps_old_policy + spec.averages + moves)
    return int(facts.trained * each)


def _moment_bytes(spec: JobSpec) -> float:
    """Bytes per element of one moment."""
    is_8bit = spec.trainer.optimizer.state == "8bit" and not spec.trainer.offloads("optimizer")
    return 1 + FP32 / BLOCK_8BIT if is_8bit else FP32


def _has_graphs(spec: JobSpec, num_elements: int) -> bool:
    """Returns True if forwards of so many latent elements replay CUDA graphs, which leave gradients in memory of their
    own."""
    part = spec.trainer
    is_captured = part.compile and part.gradient_checkpointing == "full" and not part.deterministic
    return is_captured and num_elements <= MOST_ELEMENTS


def _streamed(spec: JobSpec, trained: float) -> float:
    """Moments that are on the device while they are used, in the step of an optimizer of so many elements."""
    if spec.trainer.offloads("optimizer"):
        return (1 + MOMENTS) * FP32 * HOST_SLOTS * min(FAR_BUCKET, trained)
    at_once = {"device": 0, "host": HOST_SLOTS * HOST_BUCKET, "8bit": CHUNK_8BIT}[spec.trainer.optimizer.state]
    return MOMENTS * FP32 * min(at_once, HOST_SLOTS * trained)


def _reference(spec: JobSpec, facts: Facts) -> float:
    """A copy of the base, which LoRA does without, or of what is trained, where the reference moves."""
    if spec.kl.kl_coef > 0 and spec.kl.kl_reference.moves:
        return FP32 * facts.trained
    is_needed = spec.loss.needs_reference or spec.kl.kl_coef > 0
    return facts.params * item_bytes(spec) if is_needed and spec.trainer.mode == "full" else 0.0


def _row_bytes(spec: JobSpec, facts: Facts) -> float:
    """Bytes on the device per sample of a step: latents before and after each noisy step, and its prompt."""
    states = 2 * num_rounds(spec) if spec.records_steps else 1
    return states * facts.latent * FP32 + facts.embeds_bytes
