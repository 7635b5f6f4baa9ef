"""An adapter that a LoRA job starts from, or learns from: an exported one, one of PEFT's, or a checkpoint's weights.

Names and shapes are compared with those of the job before anything is loaded. Every rank then reads its own rows of
each factor, in float32: an export has the rounding of its `model.dtype`, a checkpoint has none.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowfleet.job.adapter_files import PREFIXES, AdapterFiles, find_adapter, peft_settings
from flowfleet.proto.rollout_pb2 import LoraSpec
from services.trainer.checkpoints.files import read_verified, stored_shapes
from services.trainer.checkpoints.state import complete_state
from services.trainer.model.loading import fill_parameter
from services.trainer.parallel.ranks import Ranks

Fill = Callable[[Mapping[str, Any], Ranks], None]


@dataclass(frozen=True)
class WarmStart:
    """An adapter on disk, by published name."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    alphas: frozenset[float]
    """LoRA alphas of its transformers; empty if the files do not say."""
    targets: tuple[str, ...]
    """Target modules; empty if the files do not say."""
    fill: Fill
    """Collective. Writes it into the shards of a job's adapter."""
    setting: str = "model.adapter"
    """Setting that names it, for messages."""

    def check(self, parameters: Mapping[str, Tensor], lora: LoraSpec) -> None:
        """Raises ValueError, with what to change, unless it is an adapter of that rank and alpha, on those modules of
        this model."""
        ranks = {shape[0] for name, shape in self.shapes.items() if ".lora_A." in name}
        if ranks != {lora.rank}:
            has = " and ".join(map(str, sorted(ranks)))
            raise self._problem(f"has rank {has}, and trainer.lora.rank is {lora.rank}: set that to {has}")
        for alpha in self.alphas:
            if alpha != lora.alpha:
                raise self._problem(
                    f"has alpha {alpha:g}, and trainer.lora.alpha is {lora.alpha:g}: set that to {alpha:g}"
                )
        self._check_modules(parameters)
        for name, parameter in parameters.items():
            if self.shapes[name] != tuple(parameter.shape):
                raise self._problem(
                    f"was trained on another model: {name} is {self.shapes[name]} in it, and {(*parameter.shape,)} "
                    "here; give the model that it belongs to as model.path"
                )

    def _check_modules(self, parameters: Mapping[str, Tensor]) -> None:
        missing, extra = sorted(parameters.keys() - self.shapes.keys()), sorted(self.shapes.keys() - parameters.keys())
        if not missing and not extra:
            return
        said = [f"does not adapt {missing[0]}"] if missing else []
        said += [f"adapts {extra[0]}, which the job does not"] if extra else []
        targets = json.dumps(list(self.targets)) if self.targets else "the modules that it adapts"
        raise self._problem(f"{' and '.join(said)}: set trainer.lora.target_modules to {targets}")

    def _problem(self, text: str) -> ValueError:
        return ValueError(f"{self.setting}: {self.path} {text}")


def open_adapter(path: Path, components: Sequence[str], setting: str = "model.adapter") -> WarmStart:
    """Opens the adapter that a setting names, for transformers of these names. Raises ValueError if it cannot be
    read."""
    try:
        files = find_adapter(path)
        start = _of_checkpoint(path) if files.layout == "checkpoint" else _of_files(path, files, components)
        return replace(start, setting=setting)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{setting}: {path} cannot be read: {error}; give a complete one") from error
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def _of_checkpoint(path: Path) -> WarmStart:
    """Reads the trained weights alone: no moments, no old policy, no averages."""
    state = complete_state(path)
    if state is None:
        raise ValueError(f"{path} is not a complete checkpoint: give another one of the job")
    prefix = "trained."
    shapes = {
        name.removeprefix(prefix): shape
        for name, shape in stored_shapes(path).items()
        if name.startswith(prefix) and ".lora_" in name
    }
    if not shapes:
        raise ValueError(f"{path} is a checkpoint of full weights: give its export as model.path instead")
    alpha = state.get("lora_alpha")

    def fill(trained: Mapping[str, Any], ranks: Ranks) -> None:
        tensors = {f"{prefix}{name}": parameter.detach() for name, parameter in trained.items()}
        read_verified(tensors, path, state, ranks)

    return WarmStart(path, shapes, frozenset() if alpha is None else frozenset([alpha]), (), fill)


def _of_files(path: Path, files: AdapterFiles, components: Sequence[str]) -> WarmStart:
    slices: dict[str, Any] = {}
    alphas: set[float] = set()
    targets: tuple[str, ...] = ()
    for number, component in enumerate(components):
        file = files.of_component(component, number)
        if not file.is_file():
            raise ValueError(f"{path} has no {file.name} for the model's {component}: give an adapter of both experts")
        opened: Any = safe_open(str(file), framework="pt")
        keys: list[str] = opened.keys()
        names = [key.removeprefix(PREFIXES[files.layout]).replace(".default.", ".") for key in keys]
        component_slices = {f"{component}.{name}": opened.get_slice(key) for name, key in zip(names, keys, strict=True)}
        config = peft_settings(file, files.layout)
        if not any(".lora_A." in name for name in component_slices):
            raise ValueError(f"{file} holds no factors of LoRA: give an adapter")
        alphas.add(_alpha(config, component_slices))
        targets = targets or _targets(config)
        slices |= component_slices

    def fill(trained: Mapping[str, Any], ranks: Ranks) -> None:
        for name, parameter in trained.items():
            fill_parameter(parameter, slices[name].__getitem__)

    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    return WarmStart(path, shapes, frozenset(alphas), targets, fill)


def _alpha(config: Mapping[str, Any], slices: Mapping[str, Any]) -> float:
    """Returns the alpha as diffusers reads it: the rank, if the file does not say."""
    if "lora_alpha" in config:
        return float(config["lora_alpha"])
    return float(min(part.get_shape()[0] for name, part in slices.items() if ".lora_A." in name))


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    targets = config.get("target_modules")
    return tuple(sorted(targets)) if isinstance(targets, list) else ()
