"""Encoded prompts that later requests find again: the same bits, within a number of bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowfleet.models.embeds import PromptEmbeds
from flowfleet.proto.rollout_pb2 import ModelSpec
from services.rollout.engines.base import GeneratedBatch, GenerationRequest
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.prompts import PromptCache
from tests.services.rollout.conftest import LORA, make_request

ROW_BYTES = 2 * 3 * 4 + 2
"""Two tokens of three float32, and their mask."""


def embeds(text: str) -> PromptEmbeds:
    return PromptEmbeds(torch.full((1, 2, 3), float(len(text))), torch.ones(1, 2, dtype=torch.bool))


def test_the_least_recently_used_prompts_go_first() -> None:
    asked: list[str] = []

    def encode(text: str) -> PromptEmbeds:
        asked.append(text)
        return embeds(text)

    cache = PromptCache(encode, max_bytes=2 * ROW_BYTES)
    for text in ("a", "bb", "a", "ccc", "a", "bb"):
        assert torch.equal(cache.get(text).embeds, embeds(text).embeds)
        assert cache.size_bytes <= 2 * ROW_BYTES
    assert asked == ["a", "bb", "ccc", "bb"]
    assert "ccc" not in cache


def test_a_prompt_that_is_larger_than_the_cache_is_encoded_each_time() -> None:
    asked: list[str] = []

    def encode(text: str) -> PromptEmbeds:
        asked.append(text)
        return embeds(text)

    cache = PromptCache(encode, max_bytes=ROW_BYTES - 1)
    cache.get("a")
    cache.get("a")
    assert (asked, cache.size_bytes) == (["a", "a"], 0)


async def test_a_request_repeated_encodes_nothing_and_has_the_same_bits(
    engine: DiffusersEngine, model: ModelSpec
) -> None:
    """Whatever was asked before: a prompt's embeds do not depend on its neighbors."""

    async def batch(request: GenerationRequest) -> GeneratedBatch:
        (made,) = [made async for made in engine.generate(request, lambda: False)]
        return made

    await engine.prepare(model, LORA)
    request = make_request(guidance_scale=3.0)
    alone = await batch(replace(request, groups=request.groups[1:]))
    assert alone.prompts == {"cache": 0, "encoder": 1}
    first, again = await batch(request), await batch(request)
    assert (first.prompts, again.prompts) == ({"cache": 1, "encoder": 1}, {"cache": 2, "encoder": 0})
    for group in (0, 1):
        assert torch.equal(first.embeds[group].embeds, again.embeds[group].embeds)
        assert torch.equal(first.negative[group].embeds, again.negative[group].embeds)
    own = first.embeds[1].trimmed().embeds
    assert torch.equal(own, alone.embeds[1].trimmed().embeds)
    for one, other in zip(first.samples, again.samples, strict=True):
        assert (one.frames == other.frames).all()
