"""Prompts of a request, encoded by a model adapter: each group's once, and the negative one.

The rows of a batch are padded to the longest of them and no further: without padding a transformer needs no mask, and a
mask rules out the fastest attention kernels. Batches follow from the request, so a repeated request makes the same
bits.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from services.rollout.engines.base import GenerationRequest


@dataclass(frozen=True)
class Encoded:
    """The prompts of a request, one row a group in the request's order, and the negative ones if guided."""

    prompts: PromptEmbeds
    negative: PromptEmbeds | None
    """Row that all groups share, or one row per group; None without guidance."""
    seconds: float
    """Time that encoding took."""
    cached: frozenset[int] = frozenset()
    """Places in the request whose prompts an earlier request had encoded."""

    def of(self, places: Sequence[int]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
        """The prompts of a batch, a row for each of these places in the request, and the negative ones: the only one,
        or a row each. Both no wider than the batch needs."""
        prompts = self.prompts.select(places).trimmed()
        if self.negative is None or len(self.negative) == 1:
            return prompts, self.negative
        return prompts, self.negative.select(places).trimmed()


class PromptEncoder:
    """Keeps prompts that it has encoded, without images, for later requests."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._texts = PromptCache(lambda text: self._adapter.encode([text]))
        self._negative_texts = PromptCache(lambda text: self._adapter.encode_negative([text]), CACHE_BYTES // 8)

    @torch.no_grad()
    def encode(self, request: GenerationRequest) -> Encoded:
        """Raises ValueError for a size that the model cannot draw, or images that it does not take, lacks, or cannot
        take in one batch."""
        self._adapter.latent_shape(request.sampling.size)
        self._adapter.resize_conditions(request.sampling.condition_pixels)
        self._adapter.size_conditions(request.sampling.size)
        texts = [] if _has_images(request) else [group.prompt for group in request.groups]
        cached = frozenset(index for index, text in enumerate(texts) if text in self._texts)
        with timed(self._adapter.device) as seconds:
            prompts, negative = self._encode(request)
        return Encoded(prompts, negative, seconds[0], cached)

    def _encode(self, request: GenerationRequest) -> tuple[PromptEmbeds, PromptEmbeds | None]:
        is_guided = request.sampling.guidance.is_on
        if not _has_images(request):
            prompts = concat_embeds([self._texts.get(group.prompt) for group in request.groups])
            return prompts, self._negatives(request) if is_guided else None
        prompts = self._with_images(request, [group.prompt for group in request.groups], self._adapter.encode)
        if not is_guided:
            return prompts, None
        return prompts, self._with_images(request, _negative_texts(request), self._adapter.encode_negative)

    def _with_images(
        self, request: GenerationRequest, texts: Sequence[str], encode: Callable[..., PromptEmbeds]
    ) -> PromptEmbeds:
        """Encodes group by group, because the sizes of their images may differ before they are resized."""
        return concat_embeds(
            [encode([text], images=[group.images]) for group, text in zip(request.groups, texts, strict=True)]
        )

    def _negatives(self, request: GenerationRequest) -> PromptEmbeds:
        texts = _negative_texts(request)
        if len(set(texts)) == 1:
            return self._negative_texts.get(texts[0])
        return concat_embeds([self._negative_texts.get(text) for text in texts])


def _has_images(request: GenerationRequest) -> bool:
    return any(group.images for group in request.groups)


def _negative_texts(request: GenerationRequest) -> list[str]:
    """Negative prompt of each group: its own, else the sampling's."""
    shared = request.sampling.negative_prompt
    return [shared if group.negative_prompt is None else group.negative_prompt for group in request.groups]


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that holds the seconds spent inside once it is left."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    devices.synchronize(device)
    seconds.append(time.perf_counter() - start)


CACHE_BYTES = 2**30
"""Host memory for encoded prompts of a replica: about 1,000 of Qwen-Image's, or 250 of FLUX's."""


class PromptCache:
    """Texts of one loaded model → embeds of one row, on the device of `encode`; least recently used first out."""

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
