"""Weights into shards: every rank reads or draws its own part of each parameter and no more.

A transformer comes without weights (`load_format="empty"`), is sharded, gets memory, and is filled here. No host ever
holds all of it: a checkpoint's files are mapped, and a rank reads only its own rows of a sharded parameter.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flowfleet.models.files import WeightFiles
from flowfleet.models.loading import dummy_parameter
from flowfleet.models.weight_files import PIPELINE, Layout
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import allocate, local, own_rows

_WRAPPED = ".base_layer."
"""Part that PEFT inserts into the parameter names of a module that it adapts."""


class Source(ABC):
    """A component's weights by their names in its checkpoint."""

    @abstractmethod
    def check(self, expert: nn.Module) -> None:
        """Raises ValueError that names a parameter which the source lacks or has in another shape."""

    @abstractmethod
    def rows(self, name: str, shape: Sequence[int], rows: slice) -> Tensor:
        """Some rows of a parameter that has `shape` as a whole; any dtype, on any device."""

    def buffer(self, name: str) -> Tensor | None:
        """Returns a buffer that checkpoints hold; None keeps the one that the model made itself."""
        return None


class DummySource(Source):
    """See `dummy_parameter`. Each rank draws the whole of one parameter after the other."""

    def __init__(self, component: str, device: torch.device) -> None:
        self._component, self._device = component, device

    def check(self, expert: nn.Module) -> None:
        """Nothing can be missing."""

    def rows(self, name: str, shape: Sequence[int], rows: slice) -> Tensor:
        return dummy_parameter(f"{self._component}.{name}", shape, torch.float32, self._device)[rows]


class CheckpointSource(Source):
    """The safetensors of a component: one file, or several with an index."""

    def __init__(self, folder: Path, layout: Layout = PIPELINE) -> None:
        """Raises ValueError as `WeightFiles`."""
        self._files = WeightFiles(folder, layout)

    def check(self, expert: nn.Module) -> None:
        expected = [(name, [name], tuple(tensor.shape)) for name, tensor in persistent(expert) if ".lora_" not in name]
        self._files.check(expected, ": it must hold every parameter by its own name, tied ones too")

    def rows(self, name: str, shape: Sequence[int], rows: slice) -> Tensor:
        return self._files.rows([name], rows)

    def buffer(self, name: str) -> Tensor | None:
        return self._files.tensor(name)


def fill_by_blocks(
    expert: nn.Module, blocks: Sequence[nn.Module], source: Source, ranks: Ranks, then: Callable[[nn.Module], object]
) -> None:
    """Allocates and fills a transformer on the meta device a block at a time; `then` is called with each that is full,
    so that no more than one is whole where it makes it smaller."""
    names = {id(module): f"{name}." for name, module in expert.named_modules()}
    prefixes = tuple(names[id(block)] for block in blocks)
    for block, prefix in zip(blocks, prefixes, strict=True):
        allocate(block, ranks.device)
        fill(expert, source, ranks, wanted=re.compile(re.escape(prefix)).match)
        then(block)
    allocate(expert, ranks.device)
    fill(expert, source, ranks, wanted=lambda name: not name.startswith(prefixes))


def fill(expert: nn.Module, source: Source, ranks: Ranks, wanted: Callable[[str], object] = bool) -> None:
    """Fills a transformer with its weights in its own dtypes, except the adapter's; or only those that `wanted` selects
    by name. Each rank fills its own rows."""
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            if ".lora_" not in name and wanted(name):
                fill_parameter(parameter, partial(source.rows, plain_name(name), parameter.shape))
                ranks.beats.beat()
        for name, buffer in persistent(expert):
            value = source.buffer(name) if not isinstance(buffer, nn.Parameter) and wanted(name) else None
            if value is not None:
                buffer.copy_(value)


def fill_parameter(parameter: Tensor, rows_of: Callable[[slice], Tensor]) -> None:
    """Copies into this rank's shard what `rows_of` gives for its rows."""
    shard = local(parameter)
    if shard.numel() == 0:
        return
    shard.copy_(rows_of(own_rows(parameter)))


def persistent(expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that checkpoints hold, by their names there."""
    kept = expert.state_dict().keys()
    yield from ((plain_name(name), parameter) for name, parameter in expert.named_parameters())
    yield from ((plain_name(name), buffer) for name, buffer in expert.named_buffers() if name in kept)


def plain_name(name: str) -> str:
    """A parameter's name in a model without adapter."""
    return name.replace(_WRAPPED, ".")
