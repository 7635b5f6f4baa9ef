"""Block-wise 8-bit numbers for AdamW's moments (Dettmers et al., https://arxiv.org/abs/2110.02861).

A row of a tensor (its first dimension) is cut into blocks of 256 elements; the last one may be shorter. A block has an
fp32 scale, its largest magnitude. Each element has a code: the nearest entry of that paper's dynamic map. In a map
without signs a positive number never becomes 0, because a second moment of 0 would let its element run away. Unlike
elsewhere, blocks never cross rows. FSDP shards by rows, so codes and scales mean the same on any number of ranks.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

BLOCK = 256
LEAST_ROW = 16
"""Minimum elements of a row; below it the scales would weigh more than is saved."""


def is_quantized(shard: Tensor) -> bool:
    """Decides by the shape of a row alone, so that all ranks agree."""
    return shard.ndim > 1 and shard.shape[1:].numel() >= LEAST_ROW


class QuantizedRows:
    """A tensor (R, ...) in 8 bits; zeros at first."""

    codes: Tensor
    """(R, ...) uint8."""
    scales: Tensor
    """(R, ceil(width / 256)) float32, `width` being the elements of a row."""

    def __init__(self, shape: Sequence[int], device: torch.device, *, signed: bool) -> None:
        self._signed = signed
        self._map = dynamic_map(signed).to(device)
        self._limits = (self._map[1:] + self._map[:-1]) / 2
        self._width = torch.Size(shape[1:]).numel()
        zero = int(torch.searchsorted(dynamic_map(signed), 0.0))
        self.codes = torch.full(tuple(shape), zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(shape[0], -(-self._width // BLOCK), device=device)

    def decode(self, rows: slice) -> Tensor:
        """(r, ...) float32 of some rows."""
        codes = self.codes[rows]
        values = self._map[codes.int()]
        return values.mul_(self._spread(self.scales[rows]).reshape(values.shape))

    def encode(self, rows: slice, values: Tensor) -> None:
        """Takes (r, ...) float32."""
        flat = values.reshape(len(values), self._width)
        padded = torch.nn.functional.pad(flat.abs(), (0, self.scales.shape[1] * BLOCK - self._width))
        scales = padded.view(len(flat), -1, BLOCK).amax(-1)
        self.scales[rows] = scales
        unit = flat / self._spread(scales.clamp_min(torch.finfo(torch.float32).tiny))
        codes = torch.bucketize(unit, self._limits, out_int32=True)
        if not self._signed:
            codes += (codes == 0) & (unit > 0)
        self.codes[rows] = codes.view(values.shape).to(torch.uint8)

    def _spread(self, scales: Tensor) -> Tensor:
        """(r, width): each element's scale."""
        return scales.repeat_interleave(BLOCK, dim=1)[:, : self._width]


@cache
def dynamic_map(signed: bool) -> Tensor:
    """(256,) float32, ascending, in [-1, 1] or [0, 1]: seven decades, each with twice the steps of the one below it; in
    a decade the middles of equal parts of [0.1, 1]; besides 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (10.0 ** (decade - 6)) * (edges[1:] + edges[:-1]) / 2
        values += middles.tolist() + (-middles).tolist() if signed else middles.tolist()
    return torch.tensor(sorted(values))
