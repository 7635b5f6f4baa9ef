"""A model without its weights: every module on torch's meta device, made of the folder's configurations alone.

Operations on it give shapes and dtypes and compute nothing, so that a model of 20 B parameters is made and run on a
laptop in seconds. Run it inside `MetaRun`, which stands in for what the meta device has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flowfleet.job.spec import LoraPart
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.empty import empty_component
from flowfleet.models.loading import ALL_COMPONENTS, Component, load_pipeline
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.models.weight_files import PIPELINE
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights import lora

META = torch.device("meta")


def load_skeleton(
    path: str | Path,
    dtype: torch.dtype,
    components: tuple[Component, ...] = ALL_COMPONENTS,
    max_sequence_length: int | None = None,
) -> ModelAdapter:
    """The adapter of a checkpoint folder, its components on the meta device, frozen, in `dtype` as a replica has them.

    Raises ValueError for a folder without a configuration, or a model that is not supported.
    """
    family = adapter_for(path)
    if family.layout != PIPELINE:
        return _own_skeleton(family, path, dtype, components, max_sequence_length)
    pipeline = load_pipeline(family.pipeline_class, path, dtype=dtype, device=META, components=(), parts=family.parts)
    index: Mapping[str, Any] = family.pipeline_class.load_config(str(path), local_files_only=True)
    for component, names in family.parts.items():
        if component not in components:
            continue
        wanted = family.vae_dtype or dtype if component == "vae" else dtype
        for name in names:
            module = _component(index, path, name, wanted)
            if module is not None:
                pipeline.register_modules(**{name: module})
    adapter = family(pipeline, family.configuration(path), dtype=dtype, device=META)
    adapter.limit_tokens(max_sequence_length)
    return adapter


def blank_prompts(skeleton: ModelAdapter, count: int, num_tokens: int, size: Size) -> PromptEmbeds:
    """Blank prompts of a job whose samples have that size."""
    prompts = skeleton.blank_prompts(count, num_tokens)
    return replace(prompts, extras={**prompts.extras, **skeleton.blank_conditions(count, size)})


def _own_skeleton(
    family: type[ModelAdapter],
    path: str | Path,
    dtype: torch.dtype,
    components: tuple[Component, ...],
    max_sequence_length: int | None,
) -> ModelAdapter:
    """Makes that of a family in a layout of its own, without what encodes prompts."""
    adapter = family.load(path, dtype=dtype, components=tuple(set(components) - {"text_encoder"}), load_format="empty")
    for module in (*adapter.experts.values(), adapter.vae):
        if module is not None:
            module.to(META)
    adapter.device = META
    adapter.limit_tokens(max_sequence_length)
    return adapter


def _component(index: Mapping[str, Any], path: str | Path, name: str, dtype: torch.dtype) -> nn.Module | None:
    try:
        module = empty_component(index, path, name, dtype)
    except OSError as error:
        raise ValueError(f"model {path} has no configuration of its {name}: {error}") from error
    return None if module is None else module.to(META)


def inject_lora(expert: nn.Module, part: LoraPart, family_targets: Sequence[str]) -> None:
    """Puts an adapter into a (shortened) transformer as the trainer does, in the transformer's dtype, as it is cast
    to for the forward. The rest is frozen. Raises ValueError for a target that the model does not have."""
    targets = part.target_modules or family_targets
    lora.inject_lora({"transformer": expert}, LoraSpec(rank=part.rank, alpha=part.alpha, target_modules=targets))


class MetaRun(TorchFunctionMode):
    """Inside, attention is the fused kernel's, which keeps no matrix of scores, and results stay where they are.

    On the meta device torch would choose the attention that materializes the scores, which no accelerator runs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if func is Tensor.cpu and args[0].device == META:
            return args[0]
        if func is torch._grouped_mm and args[0].device == META:
            return args[0] @ args[1][0]  # as many products and saved rows; this device has it for bfloat16 alone
        return func(*args, **kwargs)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention is as in `MetaRun`, also where a backward computes activations again: modes are off there."""
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _fused_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device != META:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None:  # this kernel reads keys of fewer heads as they are
        fused: Any = torch.ops.aten._scaled_dot_product_flash_attention
        attended: Tensor = fused(query, key, value, 0.0, is_causal, False, scale=scale)[0]
        return attended
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = attn_mask if attn_mask.is_floating_point() else attn_mask.to(query.dtype)
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    masked: Tensor = efficient(query, key, value, bias, torch.is_grad_enabled(), 0.0, is_causal, scale=scale)[0]
    return masked


def blocks(expert: nn.Module) -> list[nn.Module]:
    """The transformer's repeated blocks, by the class names that diffusers' models list."""
    names = set(getattr(expert, "_no_split_modules", None) or ())
    return [module for module in expert.modules() if type(module).__name__ in names]


def _block_lists(expert: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    """Lists of blocks: their owner, the name there, and the list."""
    block_ids = set(map(id, blocks(expert)))
    return [
        (owner, name, child)
        for owner in expert.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 0 and all(id(block) in block_ids for block in child)
    ]


KEPT = 3
"""Blocks of a list that are run for all of it: the first and the last differ from those between in some models."""


@contextmanager
def shortened(expert: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Inside, of each list of blocks only the first, the second and the last are there. Yields each remaining block
    with the number of blocks that it stands for."""
    lists = _block_lists(expert)
    stands_for: dict[nn.Module, int] = {}
    try:
        for owner, name, whole in lists:
            kept = [whole[0], whole[1], whole[-1]] if len(whole) > KEPT else list(whole)
            counts = [1, len(whole) - 2, 1] if len(whole) > KEPT else [1] * len(whole)
            stands_for |= dict(zip(kept, counts, strict=True))
            setattr(owner, name, nn.ModuleList(kept))
        yield stands_for
    finally:
        for owner, name, whole in lists:
            setattr(owner, name, whole)


def extrapolated(stands_for: Mapping[nn.Module, int], read: Callable[[], float], run: Callable[[], object]) -> float:
    """Returns the growth of the counter `read` in a `run` of all blocks, computed from a run of the shortened model."""
    extra, starts, handles = 0.0, {}, []
    before = read()

    def enter(block: nn.Module, *_: object) -> None:
        starts[block] = read()

    def leave(block: nn.Module, *_: object) -> None:
        nonlocal extra
        extra += (stands_for[block] - 1) * (read() - starts[block])

    for block in stands_for:
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return read() - before + extra
