"""Models made from their configurations alone: parameters without memory, everything else complete.

What a model computes when it is made, such as the tables of rotary embeddings, is there: as buffers, or as plain
attributes that no `to_empty` knows of.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

_PIPELINES = {module.name for module in pkgutil.iter_modules(diffusers.pipelines.__path__)}


def empty_component(index: Mapping[str, Any], path: str | Path, part: str, dtype: torch.dtype) -> nn.Module | None:
    """A component of a pipeline in evaluation mode, frozen, its parameters of `dtype` on the meta device, its buffers
    on the CPU. None for what is no model, such as a tokenizer, or is left out.

    Args:
        index: the checkpoint's `model_index.json`.
        path: the checkpoint's folder; of the component `part` only the configuration is read.

    Raises:
        ValueError: a class that its library does not have.
        OSError: no configuration.
    """
    library, name = index.get(part) or ("", "")
    if library in _PIPELINES:  # the module of a pipeline, which has some of its parts
        kind = getattr(importlib.import_module(f"diffusers.pipelines.{library}"), name, None)
    elif library in ("diffusers", "transformers"):
        kind = getattr(importlib.import_module(library), name, None)
    else:
        return None
    if kind is None:
        raise ValueError(f"{library} has no {name}: install the version that the checkpoint was made with")
    if not issubclass(kind, nn.Module):
        return None
    make = _of_transformers if library == "transformers" else _of_diffusers
    return empty_model(lambda: make(kind, path, part, dtype), dtype)


def empty_model(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Returns the module of `make` in evaluation mode, frozen, with parameters of `dtype` on the meta device."""
    with init_empty_weights():
        module = make()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    cast_persistent_buffers(module, dtype)
    return module.eval().requires_grad_(False)


def cast_persistent_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives buffers the dtype that a checkpoint loaded in `dtype` gives them. Those that no checkpoint holds have one
    dtype always."""
    loaded = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in loaded and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _of_diffusers(kind: Any, path: str | Path, part: str, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = kind.from_config(kind.load_config(str(path), subfolder=part, local_files_only=True))
    return module


def _of_transformers(kind: Any, path: str | Path, part: str, dtype: torch.dtype) -> nn.Module:
    config = kind.config_class.from_pretrained(str(path), subfolder=part, local_files_only=True)
    module: nn.Module = kind._from_config(config, dtype=dtype)
    return module
