"""Tables of layers that read the noise level alone, in place of their weights.

Qwen-Image's shifts, scales and gates are linears of the time embedding: 6.8 of 20.4 B weights. Their outputs at one
level are 4.4 MB. With a float8 base (`model.base`) a transformer keeps no such weights: `LevelTable` reads them once
for the levels of a schedule, and again for levels that come as a surprise.

The transformer rounds a level to its own dtype, so an entry for each rounded level is exact. A product's bits depend on
its rows: each entry comes from products of one row, so rollouts and trainers have the same bits at every batch size.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.hardware import devices

MOST_ON_DEVICE: Final = 64
"""Levels that stay on the device; all schedules of a job together rarely have more. Others lie in host memory."""
LEAST_LEVEL: Final = 2.0**-6
"""Random levels below are computed one by one."""

Weights = Callable[[str, Sequence[int]], Tensor]
"""Returns a parameter by its name in the transformer and its shape; any dtype, on any device."""


@dataclass(frozen=True)
class LevelLayers:
    """Layers of a family's transformers that a table can replace."""

    embedding: str
    """Module that embeds levels, called with (levels, a tensor of the dtype, the table's rows)."""
    linears: re.Pattern[str]
    """Names of linears that read the embedding through a SiLU next to them."""

    def names(self, transformer: nn.Module) -> list[str]:
        """Names in a transformer; none where the embedding takes further conditions."""
        if getattr(transformer.get_submodule(self.embedding), "use_additional_t_cond", False):
            return []
        return [name for name, _ in transformer.named_modules() if self.linears.fullmatch(name)]

    def fit(self, transformer: nn.Module, targets: Iterable[str]) -> bool:
        """Returns True if a table can replace the layers: there are some, and no adapter with these targets trains
        any."""
        names = self.names(transformer)
        return bool(names) and not any(f".{name}".endswith(f".{target}") for name in names for target in targets)


class Pick(nn.Module):
    """Takes a layer's output from the rows of a table."""

    place: Tensor

    def __init__(self, place: int, width: int) -> None:
        super().__init__()
        self.width = width
        # A tensor, because blocks that differ in a number would each be compiled by themselves.
        self.register_buffer("place", torch.tensor([place]), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """(B, width) of rows (B, layers, widest)."""
        return rows.index_select(1, self.place)[:, 0, : self.width]


class LevelTable:
    """Outputs of a transformer's level layers, by rounded level. `weights` is asked whenever levels are new."""

    def __init__(
        self, embedding: nn.Module, shapes: dict[str, torch.Size], weights: Weights, beat: Callable[[], None]
    ) -> None:
        """`shapes`: of the linears' weights by name."""
        self._embedding, self._shapes, self._weights, self._beat = embedding, shapes, weights, beat
        self._rows: dict[float, Tensor] = {}
        self._surprises = 0

    def expect(self, timesteps: Tensor) -> None:
        """Computes what lacks of these noise levels (1000 sigma), together: the weights are read once."""
        self._add(self._rounded(timesteps))

    def rows(self, timesteps: Tensor) -> Tensor:
        """(1, layers, widest) of one noise level (0-d, or equal ones), or (B, layers, widest), on the device."""
        levels = self._rounded(timesteps)
        if not self._rows.keys() >= set(levels):
            self._surprises += 1
            self._add(levels if self._surprises == 1 else [*levels, *self._every_level()])
        kept = {level: self._rows[level].to(self._device, non_blocking=True) for level in dict.fromkeys(levels)}
        return kept[levels[0]][None] if len(kept) == 1 else torch.stack([kept[level] for level in levels])

    @property
    def _device(self) -> torch.device:
        return next(self._embedding.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._embedding.parameters()).dtype

    def _rounded(self, timesteps: Tensor) -> list[float]:
        rounded = (timesteps.detach().to("cpu", torch.float32) / 1000).to(self._dtype)
        return cast(list[float], rounded.reshape(-1).tolist())

    def _every_level(self) -> list[float]:
        """Levels of bfloat16 from the least to 1, once a job draws them at random: to read the weights takes longer
        than to compute all. Other dtypes have too many."""
        if self._dtype != torch.bfloat16:
            return []
        first, last = torch.tensor([LEAST_LEVEL, 1.0], dtype=torch.bfloat16).view(torch.int16).tolist()
        bits = torch.arange(first, last + 1, dtype=torch.int16)
        return cast(list[float], bits.view(torch.bfloat16).tolist())

    @torch.no_grad()
    def _add(self, levels: Iterable[float]) -> None:
        new = [level for level in dict.fromkeys(levels) if level not in self._rows]
        if not new:
            return
        device, dtype = self._device, self._dtype
        like = torch.empty(0, dtype=dtype, device=device)
        embed = self._embedding.forward  # without the hook, which would ask for the table's rows
        inputs = [F.silu(embed(torch.tensor([level], dtype=dtype, device=device), like)) for level in new]
        held_on = device if len(self._rows) + len(new) <= MOST_ON_DEVICE else torch.device("cpu")
        shape = len(new), len(self._shapes), max(weight[0] for weight in self._shapes.values())
        num_bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        table = devices.byte_buffer(num_bytes, held_on).view(dtype).view(shape)
        for place, (name, weight_shape) in enumerate(self._shapes.items()):
            weight = self._weights(f"{name}.weight", weight_shape).to(device, dtype)
            bias = self._weights(f"{name}.bias", weight_shape[:1]).to(device, dtype)
            table[:, place, : len(bias)].copy_(torch.cat([F.linear(row, weight, bias) for row in inputs]))
            self._beat()
        self._rows |= dict(zip(new, table, strict=True))


def install(
    transformer: nn.Module, layers: LevelLayers, weights: Weights | None = None, beat: Callable[[], None] = lambda: None
) -> None:
    """Replaces the level layers of a transformer by a table. `weights`: None asks the layers themselves, which are kept
    where they are."""
    names = layers.names(transformer)
    linears = {name: cast(nn.Linear, transformer.get_submodule(name)) for name in names}
    shapes = {name: linear.weight.shape for name, linear in linears.items()}

    def own(name: str, shape: Sequence[int]) -> Tensor:
        linear, _, leaf = name.rpartition(".")
        return linears[linear].get_parameter(leaf)

    embedding = transformer.get_submodule(layers.embedding)
    _put(transformer, layers, shapes, LevelTable(embedding, shapes, weights or own, beat))


def share(trained: nn.Module, bare: nn.Module, layers: LevelLayers) -> None:
    """Gives a transformer the table of another of the same shape, if that has one."""
    if (table := table_of(trained)) is not None:
        _put(bare, layers, table._shapes, table)


def table_of(transformer: Any) -> LevelTable | None:
    """The transformer's table, if it has one."""
    return getattr(transformer, "level_table", None)


def _put(transformer: Any, layers: LevelLayers, shapes: dict[str, torch.Size], table: LevelTable) -> None:
    held_on = table._device
    device = torch.device("cpu") if held_on.type == "meta" else held_on
    for place, (name, shape) in enumerate(shapes.items()):
        prefix, _, leaf = name.rpartition(".")
        owner = transformer.get_submodule(prefix)
        setattr(owner, leaf, Pick(place, shape[0]).to(device))
        for beside in _activations(owner):
            setattr(owner, beside, nn.Identity())
    transformer.get_submodule(layers.embedding).register_forward_hook(_rows_of)
    transformer.level_table = table


def _activations(owner: nn.Module) -> Iterator[str]:
    yield from [name for name, child in owner.named_children() if isinstance(child, nn.SiLU)]


def _rows_of(embedding: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """In place of the embedding (B, D): the rows that came as the transformer's further condition, for each sample."""
    assert args[2] is not None, "a transformer with a table is called by its adapter"
    rows: Tensor = args[2]
    return rows.expand(len(output), *rows.shape[1:])
