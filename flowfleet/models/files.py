"""The safetensors of a checkpoint, mapped and not read: tensors by their stored names, rows of them, whole modules."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowfleet.models.loading import StoredNames
from flowfleet.models.weight_files import PIPELINE, Layout, weight_files


class WeightFiles:
    """The tensors in a folder's files: one file, or several with an index.

    Raises ValueError for a folder without such files, or with one that cannot be read.
    """

    def __init__(self, folder: Path, layout: Layout = PIPELINE) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._places: dict[str, Any] = {}
        """The open file of each tensor."""
        paths = weight_files(folder, layout)
        try:
            for path in paths:
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

    def check(self, expected: Sequence[tuple[str, Sequence[str], tuple[int, ...]]], hint: str = "") -> None:
        """Raises ValueError unless every parameter (name, stored names, shape) is here in its shape; `hint` ends the
        message of missing ones."""
        stored = [name for _, names, _ in expected for name in names]
        if missing := sorted(name for name in stored if name not in self):
            count = f"{len(missing)} of {len(stored)}"
            raise ValueError(f"{self.folder} has no weights for {count} tensors, the first is {missing[0]}{hint}")
        for _, names, shape in expected:
            wanted = shape[1:] if len(names) > 1 else shape
            for name in names:
                if (held := self.shape(name)) != wanted:
                    raise ValueError(f"{name} in {self.folder} has shape {held}, its configuration says {wanted}")

    @torch.no_grad()
    def fill(self, module: nn.Module, stored: StoredNames, device: torch.device | str, dtype: torch.dtype) -> None:
        """Gives a module the parameters that it has on the meta device, and persistent buffers, one after the other.
        Raises ValueError as `check`."""
        state = module.state_dict(keep_vars=True)
        named = [
            (name, stored.of(name, len(tensor)), tuple(tensor.shape))
            for name, tensor in state.items()
            if tensor.is_meta or not isinstance(tensor, nn.Parameter)
        ]
        self.check(named)
        for name, names, _ in named:
            prefix, _, leaf = name.rpartition(".")
            owner = module.get_submodule(prefix)
            value = self.rows(names, slice(None)).to(device, dtype)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[leaf] = value


class Prefixed:
    """`StoredNames` of a component whose parameters have their own names after a prefix, or of a part of a `whole`."""

    def __init__(self, prefix: str = "", whole: StoredNames | None = None) -> None:
        self._prefix, self._whole = prefix, whole

    def of(self, name: str, rows: int) -> list[str]:
        return self._whole.of(self._prefix + name, rows) if self._whole else [self._prefix + name]


def read_config(path: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object in a checkpoint's folder. Raises ValueError for one that is not there or cannot be read."""
    try:
        config = json.loads((Path(path) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path} has no readable {name}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model {path} has no readable {name}: it is not an object")
    return config
