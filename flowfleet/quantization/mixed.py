"""Linears with one adapter for each run of rows, so that jobs on the same base share a forward.

Rows are sorted by adapter. Outside a mixed forward a layer computes as the class it was made from. On accelerators all
adapters lie in static tensors, a slot each, padded to a common rank and with alpha / rank in B: grouped products take
the ends of the runs as a tensor, so that other slots or runs need no other code. Elsewhere each run is a product of its
own, with its adapter's rank and roundings.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.quantization.adapted import AdaptedLinear
from flowfleet.quantization.rows import Rows

RANKS = (16, 32, 64, 128)
"""Ranks that slots of static tensors have."""

Factors = tuple[Tensor, Tensor, float]
"""A, B and alpha / rank."""


def bucket(rank: int) -> int:
    """The rank that a slot has for an adapter: the next of `RANKS`; above them a multiple of the largest."""
    return next((one for one in RANKS if rank <= one), -(-rank // RANKS[-1]) * RANKS[-1])


class Flat(Exception):
    """A layer of this model takes something else than a row for each row of the forward: adapters cannot be mixed."""


class Runs:
    """Rows of the mixed forward that runs now; shared by all layers of a model."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.num_rows = 0
        """Rows of the forward; 0 outside."""
        self.parts: list[tuple[int, int, int]] = []
        """Slot, first row and end of each run."""
        self.ends = torch.zeros(slots, dtype=torch.int32, device=device)
        """End of each slot's run."""

    @contextmanager
    def of(self, slots: Sequence[int]) -> Any:
        """Around a forward whose rows have these slots, which rise."""
        assert list(slots) == sorted(slots)
        ends = [sum(one <= slot for one in slots) for slot in range(len(self.ends))]
        self.parts = [(slot, end - slots.count(slot), end) for slot, end in enumerate(ends) if slot in slots]
        self.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        self.num_rows = len(slots)
        try:
            yield
        finally:
            self.num_rows = 0


class _Mixes(PeftLinear):
    """Part that both kinds share. Made of a PEFT linear by swapping the class (`put`)."""

    runs: Runs
    slots: dict[int, Factors]
    downs: Tensor | None
    ups: Tensor | None

    @property
    def is_mixed(self) -> bool:
        return self.runs.num_rows > 0 and not self.disable_adapters

    def _mixed(self, x: Tensor, rows: Rows | None) -> Tensor:
        if len(x) != self.runs.num_rows:
            raise Flat
        output = cast(Tensor, self.base_layer(x) if rows is None else self.base_layer(x, rows=rows))
        if self.downs is None:
            return _by_run(x, output, self.runs, self.slots)
        return grouped(x, output, self.runs.ends * (x[..., 0].numel() // self.runs.num_rows), self.downs, self.ups)


class MixedLinear(_Mixes):
    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self.is_mixed:
            return self._mixed(x, rows)
        return super().forward(x, **({} if rows is None else {"rows": rows}))


class MixedAdaptedLinear(_Mixes, AdaptedLinear):
    def forward(self, x: Tensor, rows: Rows | None = None, down: Tensor | None = None) -> Tensor:
        if self.is_mixed:
            return self._mixed(x, rows)
        return AdaptedLinear.forward(self, x, rows, down)


def _by_run(x: Tensor, output: Tensor, runs: Runs, slots: Mapping[int, Factors]) -> Tensor:
    for slot, first, end in runs.parts:
        if slot in slots:
            down, up, scale = slots[slot]
            output[first:end] += F.linear(F.linear(x[first:end], down), up) * scale
    return output


def grouped(x: Tensor, output: Tensor, ends: Tensor, downs: Tensor, ups: Tensor | None) -> Tensor:
    """Adds x Aᵀ Bᵀ to the output by grouped products: rows up to ends[0] with slot 0, and so on.

    Args:
        x: (..., K).
        output: (..., N).
        ends: (S,) int32, of x's rows.
        downs: (S, K, R), the transposed A matrices.
        ups: (S, R, N), the transposed B matrices times alpha / rank.
    """
    assert ups is not None
    down = torch._grouped_mm(x.reshape(-1, x.shape[-1]), downs, offs=ends)
    return output + torch._grouped_mm(down, ups, offs=ends).view_as(output)


def put(modules: Iterable[nn.Module], runs: Runs) -> None:
    """Makes PEFT's linears among the modules, and `AdaptedLinear`s, able to mix."""
    for module in modules:
        kind = {PeftLinear: MixedLinear, AdaptedLinear: MixedAdaptedLinear}.get(type(module))  # type: ignore[arg-type]
        if kind is not None:
            mixed: Any = module
            mixed.__class__ = kind
            mixed.runs, mixed.slots, mixed.downs, mixed.ups = runs, {}, None, None


def fill(layer: Any, slot: int, factors: Factors | None, rank: int) -> None:
    """Puts an adapter's factors for one layer into a slot; None empties it. `rank`: of static tensors; 0 keeps the
    factors as they are."""
    layer.slots.pop(slot, None)
    if not rank:
        if factors is not None:
            layer.slots[slot] = factors
        return
    if layer.downs is None or layer.downs.shape[2] < rank:
        down, up = factors[:2] if factors is not None else (layer.lora_A.default.weight, layer.lora_B.default.weight)
        kept = layer.downs, layer.ups
        layer.downs = down.new_zeros(len(layer.runs.ends), down.shape[1], rank)
        layer.ups = up.new_zeros(len(layer.runs.ends), rank, up.shape[0])
        if kept[0] is not None:
            layer.downs[:, :, : kept[0].shape[2]], layer.ups[:, : kept[1].shape[1]] = kept
    layer.downs[slot], layer.ups[slot] = 0, 0
    if factors is not None:
        down, up, scale = factors
        layer.downs[slot, :, : len(down)] = down.t()
        layer.ups[slot, : up.shape[1]] = (up.float() * scale).to(up.dtype).t()


def is_mixing(model: nn.Module) -> bool:
    """Returns True inside a mixed forward of the model."""
    layer = next((module for module in model.modules() if isinstance(module, _Mixes)), None)
    return layer is not None and layer.is_mixed
