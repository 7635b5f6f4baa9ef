"""The diffusers engine: the adapter of a flow on one device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowfleet.models.base import ModelAdapter
from flowfleet.models.files import Prefixed, WeightFiles
from flowfleet.models.loading import fill_dummy
from flowfleet.models.registry import ModelFamily
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.quantization import layers
from flowfleet.weights.weights import dtype_of
from services.rollout.engines import acceleration
from services.rollout.engines.acceleration import blocks
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.local import LocalEngine, load_format
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row, Sampler, batches


class DiffusersEngine(LocalEngine[ModelAdapter]):
    """See `LocalEngine`."""

    name = "diffusers"
    writes_tokens = False

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        kind = family.load()
        if model.quantization == "fp8_base" and kind.stored is not None:
            return load_by_blocks(kind, model, self.device, self.pulse.beat)
        return super()._adapter_of(model, family)

    def _set_up(self, adapter: ModelAdapter, model: ModelSpec) -> None:
        adapter.limit_tokens(model.max_sequence_length or None)
        acceleration.accelerate(adapter.experts, compile=model.compile, quantization=model.quantization)
        if model.compile:
            adapter.compile_decoding()
            acceleration.watch_compilation(self.pulse)
        self._sampler = Sampler(adapter)

    def _check(self, request: GenerationRequest) -> None:
        assert self._family is not None
        check_request(request, self._family, self._lora)

    def _cut(self, request: GenerationRequest, encoded: Encoded) -> list[Sequence[Row]]:
        return [*batches(request, self._max_batch)]

    def _load_of(self, request: GenerationRequest, num_rows: int) -> tuple[str, float]:
        return load_of(request, num_rows)


def load_of(request: GenerationRequest, num_rows: int) -> tuple[str, float]:
    """Kind and weight of a batch for a `Pulse`: what happens between two denoising steps grows with its pixels."""
    is_given = any(group.media for group in request.groups)
    size = request.sampling.size
    return "media" if is_given else "sample", float(num_rows * size.height * size.width * size.num_frames)


def check_request(request: GenerationRequest, family: ModelFamily, lora: LoraSpec | None) -> None:
    """Raises ValueError for what the family would not heed, or needs and was not given, and for a KL to the policy
    without adapter where there is none."""
    if request.reference_kl and lora is None:
        raise ValueError(
            "reference_kl: full weights have no adapter to switch off: set trainer.mode to lora or algorithm.kl_reward "
            "to 0"
        )
    has_images = any(group.images for group in request.groups)
    if has_images and not family.takes_images:
        raise ValueError(f"{family.title} takes no condition images: remove `images` from the prompts")
    if family.takes_images and not has_images:
        raise ValueError(f"{family.title} needs condition images: give `images` to every prompt")
    if request.sampling.guidance.embedded is not None and not family.embedded_guidance:
        raise ValueError(f"{family.title} takes no embedded guidance: remove rollout.embedded_guidance")
    if not family.branch_guidance and (request.sampling.guidance.image_scale > 1 or request.sampling.guidance.renorm):
        raise ValueError(
            f"{family.title} has one branch of guidance: remove rollout.image_guidance_scale and "
            "rollout.guidance_renorm"
        )


def load_by_blocks(
    kind: Any, model: ModelSpec, device: torch.device, beat: Callable[[], None] = lambda: None
) -> ModelAdapter:
    """Loads all components of a family whose checkpoints use tensor names of their own (`stored`). The transformer
    becomes a float8 base.

    Raises ValueError as the family's `load`, and for a device or dtype without float8 products.
    """
    dtype, format = dtype_of(model.dtype), load_format(model)
    layers.require_fp8(device, dtype, "model.base = 'fp8'", emulated=True)
    adapter: ModelAdapter = kind.load(
        model.path, dtype=dtype, device=device, components=("text_encoder", "vae"), load_format=format
    )
    bare: ModelAdapter = kind.load(model.path, dtype=dtype, components=("transformer",), load_format="empty")
    files = None if format == "dummy" else WeightFiles(Path(model.path), kind.layout)

    def fill(component: str, module: nn.Module, prefix: str) -> None:
        if files is None:
            fill_dummy(module, f"{component}.{prefix}".rstrip("."), device)
        else:
            files.fill(module, Prefixed(prefix, kind.stored), device, dtype)
        beat()

    for component, expert in bare.experts.items():
        for name, block in blocks(expert).items():
            fill(component, block, f"{name}.")
            layers.replace_weights([block])
        fill(component, expert, "")
        setattr(adapter.pipeline, component, expert.to(device))
    return adapter
