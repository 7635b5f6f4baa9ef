"""Facts behind a job's memory and work, measured on the model's skeleton: sizes, activations, FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from flowfleet.algorithms.coarse import check_noise
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.planning.activations import Activations, measure
from flowfleet.planning.flops import ModelFlops, count_model, flops_of, forward
from flowfleet.planning.live import LiveBytes
from flowfleet.planning.skeleton import META, MetaRun, blank_prompts, blocks, fused_attention, load_skeleton, shortened
from flowfleet.quantization.layers import large_experts, large_linears
from flowfleet.rewards.gradients import num_decoded_together
from flowfleet.weights.weights import dtype_of

DECODED_PIXELS = 2**22
"""Maximum pixels decoded at once: decoding memory does not grow with the rows beyond the adapter's chunk."""


@dataclass(frozen=True)
class Facts:
    """Counts are of elements unless they say bytes; of all experts together unless they say otherwise."""

    num_experts: int
    params: int
    trained: int
    block: int
    """Parameters of the largest block, its adapter included."""
    outside: int
    """Parameters of one expert outside its blocks."""
    fp8: int
    """Weights of linears that fp8 rollouts have copies of, and an fp8 base holds in place of others."""
    fp8_experts: int
    """Weights of a mixture's experts that an fp8 base holds in float8."""
    tabled: int
    """Weights of layers that read the noise level alone, which an fp8 base has tables in place of."""
    merged_bytes: int
    """Weights that have an adapter, in the model's dtype: rollouts with a merged adapter have copies of them."""
    text_encoder_bytes: int
    vae_bytes: int
    latent: int
    """Latent elements of one sample."""
    embeds_bytes: int
    """Bytes of one prompt's embeddings."""
    activations: Activations
    """Activations of one forward and backward of `trainer.micro_batch_size` rows."""
    sampling_bytes: int
    """Held by a forward of `rollout.batch_size` rows, at most."""
    decode_bytes: int
    gradient_bytes: int
    """Held by decoding one sample with gradient and its backward, at most; 0 unless the job trains on gradients."""
    flops: ModelFlops
    decode_flops: float
    """FLOPs to decode one sample."""


def gather(spec: JobSpec, text_tokens: int, *, compiled: bool) -> Facts:
    """`compiled`: whether the trainer's blocks are.

    Raises ValueError for a folder without configurations, a size that the model cannot draw, noise that its schedule is
    too coarse for, or targets of LoRA that it does not have.
    """
    model, rollout, size = spec.model, spec.rollout, spec.rollout.size
    skeleton = load_skeleton(model.path, dtype_of(model.dtype), max_sequence_length=model.max_sequence_length)
    skeleton.resize_conditions(rollout.condition_pixels)
    check_noise(spec, skeleton.schedule(rollout.num_inference_steps, size, rollout.shift))
    experts = skeleton.experts
    expert = next(iter(experts.values()))
    latent = math.prod(skeleton.latent_shape(size))
    params = _numel(parameter for module in experts.values() for parameter in module.parameters())
    inner = [blocks(module) for module in experts.values()]
    fp8 = sum(_numel(_quantized(module)) for module in experts.values())
    fp8_experts = sum(_numel(getattr(module, name) for module, name in large_experts(part)) for part in inner)
    decode_bytes, decode_flops = _decoding(skeleton, spec)
    gradient_bytes = _decoding_with_gradient(skeleton, spec) if spec.trains_on_gradients else 0
    flops = count_model(skeleton, spec)
    targets = spec.trainer.lora.target_modules or skeleton.lora_targets
    tabled = sum(_tabled(skeleton, module, targets) for module in experts.values())
    if spec.trainer.mode == "full":
        expert.requires_grad_(True)
    with shortened(expert) as stands_for:
        adapter = _of_all_blocks(_adapter_numel, expert, stands_for) * len(experts)
        merged = _of_all_blocks(_adapted_bytes, expert, stands_for) * len(experts)
        activations = _training(skeleton, spec, expert, stands_for, text_tokens, compiled=compiled)
        sampling = _sampling(skeleton, spec, text_tokens)
        block = max(_numel(kept.parameters()) for kept in stands_for)
    prompts = blank_prompts(skeleton, 1, text_tokens, size)
    return Facts(
        num_experts=len(experts),
        params=params,
        trained=adapter if spec.trainer.mode == "lora" else params,
        block=block,
        outside=_numel(expert.parameters()) - _numel({*chain(*(block.parameters() for block in inner[0]))}),
        fp8=fp8,
        fp8_experts=fp8_experts,
        tabled=tabled,
        merged_bytes=merged,
        text_encoder_bytes=_part_bytes(skeleton, "text_encoder"),
        vae_bytes=_part_bytes(skeleton, "vae"),
        latent=latent,
        embeds_bytes=sum(_nbytes(tensor) for tensor in (prompts.embeds, prompts.mask, *prompts.extras.values())),
        activations=activations,
        sampling_bytes=sampling,
        decode_bytes=decode_bytes,
        gradient_bytes=gradient_bytes,
        flops=flops,
        decode_flops=decode_flops,
    )


def _training(
    skeleton: ModelAdapter,
    spec: JobSpec,
    expert: nn.Module,
    stands_for: Mapping[nn.Module, int],
    text_tokens: int,
    *,
    compiled: bool,
) -> Activations:
    rows, size = spec.trainer.micro_batch_size, spec.rollout.size
    latents = torch.empty(rows, *skeleton.latent_shape(size), device=META)
    prompts = blank_prompts(skeleton, rows, text_tokens, size)

    def run() -> None:
        skeleton.velocity(latents, torch.tensor(1000.0), prompts, size=size)

    return measure(run, expert, stands_for, rows, compiled=compiled)


def _sampling(skeleton: ModelAdapter, spec: JobSpec, text_tokens: int) -> int:
    """Bytes of the larger batch: one that is trained on, or held out."""
    batches = {spec.rollout.size: spec.rollout.batch_size}
    if spec.data.is_validated:
        rows = spec.held_out_per_request * spec.schedule.validation_samples
        batches[spec.validation_size] = max(rows, batches.get(spec.validation_size, 0))
    peaks = []
    for size, rows in batches.items():
        with LiveBytes() as live:
            latents = torch.empty(rows, *skeleton.latent_shape(size), device=META)
            forward(skeleton, latents, blank_prompts(skeleton, rows, text_tokens, size), size)
        peaks.append(int(live.peak))
    return max(peaks)


def _decoding(skeleton: ModelAdapter, spec: JobSpec) -> tuple[int, float]:
    """Bytes of a batch, and FLOPs of one sample."""
    size = spec.rollout.size.whole
    pixels = size.height * size.width * size.num_frames
    rows = max(1, min(spec.rollout.batch_size, DECODED_PIXELS // pixels))
    latents = torch.empty(rows, *skeleton.latent_shape(size), device=META)
    with MetaRun(), LiveBytes() as live:
        flops = flops_of(lambda: skeleton.decode(latents, size))
    return live.peak, flops / rows


def _decoding_with_gradient(skeleton: ModelAdapter, spec: JobSpec) -> int:
    """Bytes of the samples that the trainer decodes together: activations are computed again where the VAE can."""
    skeleton.checkpoint_decoding()
    rows = min(spec.trainer.micro_batch_size, num_decoded_together(spec.rollout.size))
    latents = torch.empty(rows, *skeleton.latent_shape(spec.rollout.size), device=META, requires_grad=True)
    with fused_attention(), LiveBytes() as live:
        pixels = skeleton.pixels(latents, spec.rollout.size)
        torch.autograd.backward([pixels], [torch.empty_like(pixels)])
    return int(live.peak)


def _of_all_blocks(count: Callable[[nn.Module], int], expert: nn.Module, stands_for: Mapping[nn.Module, int]) -> int:
    """Returns the count of a whole transformer, of which only few blocks are kept."""
    return count(expert) + sum((number - 1) * count(block) for block, number in stands_for.items())


def _adapter_numel(module: nn.Module) -> int:
    return _numel(parameter for name, parameter in module.named_parameters() if ".lora_" in name)


def _adapted_bytes(module: nn.Module) -> int:
    """Weights that have an adapter, in the model's dtype."""
    bases = [cast(nn.Linear, part.base_layer) for part in module.modules() if isinstance(part, PeftLinear)]
    return sum(_nbytes(base.weight) for base in bases)


def _quantized(expert: nn.Module) -> Iterable[Tensor]:
    return (cast(Tensor, linear.weight) for linear in large_linears(blocks(expert)))


def _tabled(skeleton: ModelAdapter, expert: nn.Module, targets: Iterable[str]) -> int:
    layers = skeleton.level_layers
    if layers is None or not layers.fit(expert, targets):
        return 0
    return sum(_numel(expert.get_submodule(name).parameters()) for name in layers.names(expert))


def _part_bytes(skeleton: ModelAdapter, component: str) -> int:
    parts = (getattr(skeleton.pipeline, name, None) for name in skeleton.parts[component])  # type: ignore[index]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return sum(_nbytes(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers()))


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
