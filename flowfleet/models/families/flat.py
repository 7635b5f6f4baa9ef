"""Checkpoints that are one folder of safetensors and a `config.json`, without diffusers' folders for components.

A family with such checkpoints says how the parameters of its transformer are named in these files (`StoredNames`, as
its class attribute `stored`). Trainers then read their rows from the files, and an export has the files' other tensors
unchanged next to the trained ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowfleet.models.loading import Layout, StoredNames, weight_files

LAYOUT: Final = Layout("flowfleet", in_root=True, stem="model")


class FlatPipeline(SimpleNamespace):
    """The components of such a checkpoint, in place of diffusers' pipeline."""

    def register_modules(self, **modules: Any) -> None:
        """Sets components, like the method of diffusers' pipelines."""
        self.__dict__.update(modules)


class FlatFiles:
    """The tensors of a folder's files, mapped and not read.

    Raises ValueError for a folder without such files, or with one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._places: dict[str, Any] = {}
        try:
            for path in weight_files(folder, LAYOUT):
                file = self._files.enter_context(safe_open(str(path), framework="pt"))
                self._places |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(f"the weights in {folder} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._places))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        whole: Tensor = self._places[name].get_tensor(name)
        return whole

    def rows(self, names: Sequence[str], rows: slice) -> Tensor:
        """Rows of a parameter with these stored names (`StoredNames.of`); only what they need is read."""
        if len(names) > 1:
            return torch.stack([self.tensor(name) for name in names[rows]])
        part: Tensor = self._places[names[0]].get_slice(names[0])[rows]
        return part

    def check(self, expected: Sequence[tuple[str, Sequence[str], tuple[int, ...]]]) -> None:
        """Raises ValueError unless every parameter (name, stored names, shape) is here in its shape."""
        missing = [name for _, names, _ in expected for name in names if name not in self]
        if missing:
            raise ValueError(f"{self.folder} has no weights for {len(missing)} tensors, the first is {missing[0]}")
        for name, names, shape in expected:
            wanted = shape[1:] if len(names) > 1 else shape
            for stored in names:
                if (found := self.shape(stored)) != wanted:
                    raise ValueError(f"{stored} in {self.folder} has shape {found}, {name} needs {wanted}")

    @torch.no_grad()
    def fill(self, module: nn.Module, stored: StoredNames, device: torch.device | str, dtype: torch.dtype) -> None:
        """Gives a module on the meta device its parameters, one after the other. Raises ValueError as `check`."""
        named = [
            (name, stored.of(name, len(tensor)), tuple(tensor.shape)) for name, tensor in module.named_parameters()
        ]
        self.check(named)
        for name, names, _ in named:
            owner = module.get_submodule(name.rpartition(".")[0])
            value = self.rows(names, slice(None)).to(device, dtype)
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(value, requires_grad=False)


class Prefixed:
    """`StoredNames` of a component whose parameters have their own names after a prefix."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def of(self, name: str, rows: int) -> list[str]:
        return [self._prefix + name]


def read_config(path: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises ValueError for one that is not there or cannot be read."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / name).read_text(encoding="utf-8"))
        return config
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path} has no readable {name}: {error}") from error
