"""Loads parts of a diffusers checkpoint folder, never from the network, with errors that name the folder."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from packaging.version import Version
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from flowfleet.hardware import staging
from flowfleet.models.empty import empty_component
from flowfleet.models.weight_files import PIPELINE as PIPELINE  # these five: plugins import them from here
from flowfleet.models.weight_files import TRANSFORMERS as TRANSFORMERS
from flowfleet.models.weight_files import Layout as Layout
from flowfleet.models.weight_files import check_part
from flowfleet.models.weight_files import refuse_pickles as refuse_pickles
from flowfleet.models.weight_files import weight_files as weight_files

Component = Literal["transformer", "text_encoder", "vae"]
"""A kind of part that costs memory: all transformers, all text encoders with their tokenizers, the VAE."""

LoadFormat = Literal["safetensors", "dummy", "empty"]
"""Where weights come from: files; their names (`dummy_parameter`); nowhere: parameters are on the meta device, for a
caller who fills them. The last two read configurations alone of what is a model."""

ALL_COMPONENTS: tuple[Component, ...] = ("transformer", "text_encoder", "vae")

Parts = Mapping[Component, tuple[str, ...]]
"""Component to the names of what it is made of in a pipeline."""

USUAL_PARTS: Parts = {"transformer": ("transformer",), "text_encoder": ("text_encoder", "tokenizer"), "vae": ("vae",)}

DTYPE_KEYWORD = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"


class StoredNames(Protocol):
    """Names of a transformer's parameters in the files of a checkpoint that is not in diffusers' layout."""

    def of(self, name: str, rows: int) -> list[str]:
        """Stored tensors of a parameter of so many rows: the one that it is, or one for each of its rows."""


def load_pipeline(
    pipeline_class: Any,
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    components: Sequence[Component],
    parts: Parts = USUAL_PARTS,
    own_parts: tuple[str, ...] = (),
    vae_dtype: torch.dtype | None = None,
    load_format: LoadFormat = "safetensors",
) -> Any:
    """A `pipeline_class` whose named components are loaded, frozen and in evaluation mode, and whose others are None.
    Their weights come from where `load_format` says.

    `parts` names what each component is made of; a part that the checkpoint itself leaves out stays None, and so do
    `own_parts`, which the family makes by itself. All are loaded in `dtype`, the VAE in `vae_dtype` if that is given.

    Raises:
        ValueError: a folder that lacks a component or holds one that cannot be read.
    """
    absent = {part: None for component in ALL_COMPONENTS if component not in components for part in parts[component]}
    absent |= dict.fromkeys(own_parts)
    dtypes = {"default": dtype} | dict.fromkeys(parts["vae"], vae_dtype or dtype)
    options: dict[str, Any] = {DTYPE_KEYWORD: dtypes, "local_files_only": True, "use_safetensors": True, **absent}
    try:
        with _no_progress_bars():
            index = pipeline_class.load_config(str(path), local_files_only=True)
            options |= _left_out(index, parts)
            wanted = [part for name in components for part in parts[name] if part not in own_parts]
            if load_format == "safetensors":
                for part in (*wanted, "scheduler"):
                    check_part(Path(path), part, index)
            else:
                made = {part: empty_component(index, path, part, dtypes.get(part, dtype)) for part in wanted}
                options |= {part: module for part, module in made.items() if module is not None}
            pipeline = pipeline_class.from_pretrained(str(path), **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"model {path} cannot be loaded as a {pipeline_class.__name__}: {error}") from error
    for part in (part for name in components for part in parts[name]):
        loaded = getattr(pipeline, part, None)
        if isinstance(loaded, nn.Module):
            if load_format == "dummy":
                fill_dummy(loaded, part, device)
            if load_format != "empty":
                staging.move(loaded, device)
            loaded.eval().requires_grad_(False)
    for part in parts["transformer"] if "transformer" in components else ():
        transformer = getattr(pipeline, part, None)
        if transformer is not None:
            _cast_parameters(transformer, dtype)
            staging.align(transformer)
    return pipeline


def fill_dummy(
    module: nn.Module, component: str, device: torch.device | str, *, held_on: torch.device | str | None = None
) -> None:
    """Gives a model of `empty_component`, or what of it is on the meta device, its dummy parameters, one after the
    other, drawn on `device` and held there or on another."""
    for prefix, owner in module.named_modules():
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter.is_meta:
                name = ".".join(filter(None, (component, prefix, leaf)))
                drawn = dummy_parameter(name, parameter.shape, parameter.dtype, device)
                owner._parameters[leaf] = nn.Parameter(drawn.to(held_on or device), requires_grad=False)
    tie = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()


def _cast_parameters(transformer: nn.Module, dtype: torch.dtype) -> None:
    """diffusers keeps a few of Wan's parameters in float32 whatever `dtype` is asked for. A trainer's forward has all
    in one, as FSDP casts them, so a rollout must as well; what they compute is cast to `dtype` soon after anyway."""
    for parameter in transformer.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _left_out(index: Mapping[str, Any], parts: Mapping[Component, tuple[str, ...]]) -> dict[str, None]:
    """The parts that a `model_index.json` says are left out, such as T5 or a second expert; never a component's first,
    which it cannot do without."""
    optional = (part for names in parts.values() for part in names[1:])
    return {part: None for part in optional if part in index and list(index[part]) == [None, None]}


def component_config(component_class: Any, path: str | Path, folder: str) -> dict[str, Any]:
    """A component's settings without its weights; what its configuration file leaves out is at the class's default.

    Raises:
        ValueError: the checkpoint has no such component.
    """
    parameters = inspect.signature(component_class.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    try:
        config: dict[str, Any] = component_class.load_config(str(path), subfolder=folder, local_files_only=True)
    except OSError as error:
        raise ValueError(f"model {path} has no configuration of its {folder}: {error}") from error
    return defaults | config


def dummy_parameter(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The random weights of `load_format = "dummy"`: the same bits for a name and shape on every process of the same
    kind of device, in any dtype up to rounding, for they are drawn in float32.

    Args:
        name: `<component>.<name>`, as full weights are published.
        shape: of the whole parameter; a shard is a part of it.
        dtype: floating point.
        device: that draws and holds it.

    Returns:
        (*shape) of `dtype`: ones for scales (a vector named `weight`, or anything named `gamma`), zeros for all other
        vectors, else normal with a deviation of 0.02.
    """
    leaf = name.rpartition(".")[2]
    if leaf == "gamma" or (len(shape) < 2 and leaf == "weight"):
        return torch.ones(*shape, dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.zeros(*shape, dtype=dtype, device=device)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.empty(*shape, dtype=torch.float32, device=device).normal_(std=0.02, generator=generator)
    return drawn.to(dtype)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps bars out of a service's log; puts back what the process had chosen."""
    libraries: tuple[Any, Any] = diffusers_logging, transformers_logging
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
