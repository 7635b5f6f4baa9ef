"""Merges an exported adapter into its base: a whole pipeline, W + alpha / rank · B A, summed in float32.

Reads the base file by file, so that memory holds one of its files at a time. Whatever is not adapted is linked where
the file system can, else copied.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowfleet.filesystem import link_or_copy
from flowfleet.job.adapter_files import PEFT_CONFIG, PEFT_FILE
from flowfleet.weights.files import sort_metadata

_PREFIX = "base_model.model."
FIRST = "transformer"


def merge(base: Path, adapter: Path, folder: Path) -> None:
    """Writes the pipeline to a new folder. Raises ValueError for an adapter that is not of this base."""
    if not (base / "model_index.json").is_file():
        raise ValueError(f"{base} holds no diffusers pipeline: give the base model of the adapter by --base")
    parts = {FIRST: adapter} | {path.parent.name: path.parent for path in sorted(adapter.glob(f"*/{PEFT_CONFIG}"))}
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(base, aside, copy_function=link_or_copy)
    try:
        for component, part in parts.items():
            _merge(aside / component, part)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _merge(component: Path, adapter: Path) -> None:
    """Replaces a component's files that hold adapted weights."""
    config = json.loads((adapter / PEFT_CONFIG).read_text(encoding="utf-8"))
    factors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(adapter / PEFT_FILE).items()}
    scale = float(config["lora_alpha"]) / float(config["r"])
    left = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    for file in sorted(component.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            names, metadata = set(opened.keys()), opened.metadata()
        adapted = {module for module in left if f"{module}.weight" in names}
        if adapted:
            state = load_file(file)
            for module in adapted:
                state[f"{module}.weight"] = _sum(state[f"{module}.weight"], factors, module, scale)
            _replace(file, state, metadata)
        left -= adapted
    if left:
        raise ValueError(f"the base's {component.name} has no {min(left)}: the adapter is of another model")


def _sum(weight: Tensor, factors: Mapping[str, Tensor], module: str, scale: float) -> Tensor:
    down, up = (factors[f"{module}.lora_{factor}.weight"].float() for factor in "AB")
    added = up.flatten(1) @ down.flatten(1)
    if added.shape != weight.flatten(1).shape:
        raise ValueError(f"{module} has another shape in the base: the adapter is of another model")
    return torch.add(weight.float(), added.view_as(weight), alpha=scale).to(weight.dtype)


def _replace(file: Path, state: dict[str, Tensor], metadata: Any) -> None:
    """The file may be a link to the base's own: it is never written into."""
    mode = file.stat().st_mode & 0o777
    aside = file.with_name(f".{file.name}.merged")
    try:
        save_file(state, aside, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{aside} cannot be written: {error}") from None
    sort_metadata(aside)
    aside.chmod(mode)
    os.replace(aside, file)
