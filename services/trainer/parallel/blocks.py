"""Blocks of a transformer: checkpointing of their activations, and their compilation.

Both replace a block's `forward` in place, so that names of parameters stay. They come after the adapter is injected and
before FSDP, whose hooks stay outside. Checkpointing comes first, then `compile_blocks`.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flowfleet.hardware import compiling
from flowfleet.models.trainable import blocks_of

RECOMPUTED_BELOW = 256
"""Selective checkpointing keeps a matrix product of at least this inner dimension: to compute an element of it again
costs that many multiplications. An adapter's second product, of the inner dimension `lora.rank`, is as large."""

_aten: Any = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 1),
    _aten.bmm.default: (0, 2),
    _aten._scaled_mm.default: (0, 1),
    _aten._grouped_mm.default: (0, 1),
}
"""Which argument, and which of its dimensions, is the inner one."""
_ATTENTION = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math",
    )
    if hasattr(_aten, name)
}


def checkpoint_blocks(expert: nn.Module, kind: Literal["selective", "full"], *, is_compiled: bool = False) -> None:
    """Makes each block forget its activations and compute them again in the backward; `selective` keeps the results of
    attention and of matrix products that are costly for their size. Where the blocks are compiled afterwards,
    `is_compiled` has every operator marked as one to compute again: the marks of torch 2.11 stop at an
    autograd.Function, whose products it then keeps.

    The transformers' own `enable_gradient_checkpointing` is not used, because diffusers' Chroma then leaves the
    attention mask out. Raises ValueError for a transformer that does not say what its blocks are.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _selective)
    elif is_compiled:
        nothing = lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731
        options["context_fn"] = partial(create_selective_checkpoint_contexts, nothing)
    for block in blocks_of(expert):
        block.forward = _checkpointed(block.forward, options)


def compile_blocks(expert: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles each block when it is first used; blocks of one kind share what was compiled. The text's width becomes a
    variable when a second one comes. Raises ValueError for a transformer that does not say what its blocks are."""
    compiling.prepare()
    for block in blocks_of(expert):
        block.forward = torch.compile(block.forward, backend=backend)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _selective(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if op in _PRODUCTS:
        argument, dimension = _PRODUCTS[op]
        if args[argument].shape[dimension] >= RECOMPUTED_BELOW:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
