"""Encoded prompts of earlier requests, least recently used first out, within a number of bytes of host memory.

A cache belongs to one loaded model: training changes its transformers and never its text encoders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from flowfleet.models.embeds import PromptEmbeds

CACHE_BYTES = 2**30
"""Host memory for encoded prompts of a replica: about 1,000 of Qwen-Image's, or 250 of FLUX's."""


class PromptCache:
    """Maps texts to embeds of one row, on the device of `encode`."""

    def __init__(self, encode: Callable[[str], PromptEmbeds], max_bytes: int = CACHE_BYTES) -> None:
        self._encode, self._max_bytes = encode, max_bytes
        self._rows: OrderedDict[str, PromptEmbeds] = OrderedDict()
        self._devices: dict[str, torch.device] = {}
        self.size_bytes = 0

    def __contains__(self, text: str) -> bool:
        return text in self._rows

    def get(self, text: str) -> PromptEmbeds:
        """The encoded prompt. It is encoded alone, so that its bits depend on no other prompt and on no earlier
        request."""
        if text in self._rows:
            self._rows.move_to_end(text)
            return self._rows[text].to(self._devices[text])
        row = self._encode(text)
        self._keep(text, row)
        return row

    def _keep(self, text: str, row: PromptEmbeds) -> None:
        self._rows[text], self._devices[text] = row.to("cpu"), row.embeds.device
        self.size_bytes += _size(row)
        while self.size_bytes > self._max_bytes:
            oldest, dropped = self._rows.popitem(last=False)
            del self._devices[oldest]
            self.size_bytes -= _size(dropped)


def _size(row: PromptEmbeds) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (row.embeds, row.mask, *row.extras.values()))
