"""Live parameters of vLLM-Omni's transformers under the names that weights are published by, which are diffusers'.

vLLM-Omni fuses some linears, such as q, k and v, into one. Their parts are handed out as views, so whoever copies into
one or hashes it works on what the forward uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowfleet.hardware import staging
from flowfleet.models.loading import dummy_parameter
from flowfleet.models.weight_files import weight_files
from flowfleet.weights import weights


def live_parameters(experts: Mapping[str, nn.Module], renames: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns all parameters of all transformers as `<component>.<diffusers' name>`. Parts of fused ones are views.

    Args:
        experts: transformers by component; their `packed_modules_mapping` names the parts of fused linears.
        renames: parts of a module's name, each with the one that diffusers has in its place.
    """
    return {
        f"{component}.{name}": parameter
        for component, transformer in experts.items()
        for name, parameter in _named(transformer, renames)
    }


def _named(transformer: nn.Module, renames: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    packed: Mapping[str, list[str]] = getattr(transformer, "packed_modules_mapping", {})
    for name, parameter in transformer.named_parameters():
        path, _, leaf = name.replace(".base_layer.", ".").rpartition(".")  # That is what LoRA has wrapped.
        parent, _, module = path.rpartition(".")
        parts = packed.get(module, [])
        if not parts:
            yield diffusers_name(f"{path}.{leaf}" if path else leaf, renames), parameter.data
            continue
        owner: Any = transformer.get_submodule(name.rpartition(".")[0])
        for part, view in zip(parts, torch.split(parameter.data, list(owner.output_sizes)), strict=True):
            yield diffusers_name(f"{parent}.{part}.{leaf}", renames), view


def diffusers_name(name: str, renames: Mapping[str, str]) -> str:
    """The name that diffusers gives a module or parameter of vLLM-Omni's."""
    for ours, theirs in renames.items():
        name = name.replace(ours, theirs)
    return name


def stored_buffers(experts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Tensors of checkpoints that are not parameters, such as tables of positions; neither trained nor published."""
    return {
        f"{component}.{name}": buffer
        for component, transformer in experts.items()
        for name, buffer in transformer.state_dict(keep_vars=True).items()
        if not isinstance(buffer, nn.Parameter)
    }


@torch.no_grad()
def fill_from_folder(
    live: Mapping[str, Tensor], buffers: Mapping[str, Tensor], path: str | Path, components: list[str]
) -> None:
    """Reads the transformers' weights of a diffusers checkpoint folder into live parameters, one after the other, and
    those of the buffers that are there.

    Raises ValueError if a file cannot be read, or holds other names or shapes than the model.
    """
    missing = set(live)
    for component in components:
        for file in weight_files(Path(path) / component):
            missing -= _fill_from_file({**buffers, **live}, file, component)
    if missing:
        raise ValueError(f"model {path} lacks {len(missing)} weights of its transformer, such as {min(missing)}")


def _fill_from_file(live: Mapping[str, Tensor], file: Path, component: str) -> set[str]:
    filled, pairs = set(), []
    try:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                target = live.get(f"{component}.{name}")
                value = stored.get_tensor(name)
                if target is None:
                    raise ValueError(f"{file}: {name} is not a parameter of this transformer")
                if target.shape != value.shape:
                    raise ValueError(f"{file}: {name} has shape {[*value.shape]}, expected {[*target.shape]}")
                pairs.append((target, value))
                filled.add(f"{component}.{name}")
            staging.copy_all(pairs)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return filled


@torch.no_grad()
def fill_dummy(live: Mapping[str, Tensor]) -> None:
    """The weights of `load_format = "dummy"`, by their names."""
    for name, parameter in live.items():
        parameter.copy_(dummy_parameter(name, parameter.shape, parameter.dtype, parameter.device))


def require_dtype(live: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raises ValueError for a model that keeps parameters in another dtype, for these could not be sent."""
    for name, parameter in live.items():
        if parameter.dtype != dtype:
            raise ValueError(f"{name} is {weights.dtype_name(parameter.dtype)}, not {weights.dtype_name(dtype)}")
