"""Live parameters of vLLM's models under the names that weights are published by, which are transformers'.

vLLM fuses q, k and v, and gate and up projections, and pads vocabularies. What is handed out are views, so whoever
copies into one or hashes it works on what the forward uses.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from flowfleet.models.sequences.adapter import MODEL
from flowfleet.weights import weights

EXPERTS: Final = {
    "experts.routed_experts.w13_weight": "experts.gate_up_proj",
    "experts.routed_experts.w2_weight": "experts.down_proj",
}
"""Ends of the names of a mixture's experts, which both libraries hold alike."""


def live_parameters(model: nn.Module, expected: Mapping[str, Tensor], renames: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns all parameters as `model.<transformers' name>`, ordered as `expected`. Parts of fused ones are views.

    `renames` are beginnings of names in vLLM's model, and in transformers'.

    Raises ValueError where names, shapes or dtypes are not those of `expected`, such as for a model that vLLM packed
    for a kernel.
    """
    live = {f"{MODEL}.{transformers_name(name, renames)}": value for name, value in _named(model)}
    missing, extra = sorted(expected.keys() - live.keys()), sorted(live.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"vLLM's model has other parameters than transformers': missing {missing[:3]}, unexpected {extra[:3]}; "
            "start rollouts with --engine transformers"
        )
    for name, value in expected.items():
        if live[name].shape != value.shape or live[name].dtype != value.dtype:
            raise ValueError(
                f"vLLM holds {name} as {weights.dtype_name(live[name].dtype)} {[*live[name].shape]}, transformers as "
                f"{weights.dtype_name(value.dtype)} {[*value.shape]}: start rollouts with --engine transformers"
            )
    return {name: live[name] for name in expected}


def transformers_name(name: str, renames: Mapping[str, str]) -> str:
    """The name that transformers gives a parameter of vLLM's."""
    start = next((ours for ours in renames if name.startswith(ours)), None)
    return name if start is None else renames[start] + name.removeprefix(start)


def vllm_name(name: str, renames: Mapping[str, str]) -> str:
    """The inverse of `transformers_name`."""
    start = next((ours for ours, theirs in renames.items() if name.startswith(theirs)), None)
    return name if start is None else start + name.removeprefix(renames[start])


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        path = path.removesuffix(".base_layer")  # That is what LoRA has wrapped.
        parent, _, module = path.rpartition(".")
        parts = packed.get(module, [])
        if len(parts) > 1 and hasattr(owner, "output_sizes"):
            for part, view in zip(parts, torch.split(parameter.data, list(owner.output_sizes)), strict=True):
                yield f"{parent}.{part}.{leaf}", view
        elif hasattr(owner, "org_vocab_size"):
            yield f"{path}.{leaf}", parameter.data[: owner.org_vocab_size]
        else:
            yield _renamed(f"{path}.{leaf}"), parameter.data


def _renamed(name: str) -> str:
    for ours, theirs in EXPERTS.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name
