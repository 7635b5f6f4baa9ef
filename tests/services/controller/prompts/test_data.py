"""Which prompt a step gets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.data import DataPart
from flowfleet.prompts.prompt import Prompt
from flowfleet.seeds import derive_seed
from services.controller.prompts.data import Deal
from services.controller.prompts.mixture import Mixture


def deal_of(prompts: list[Prompt], seed: int, count: int) -> Deal:
    """The deal of a job with `data.train`."""
    return Deal([prompts], Mixture(DataPart(train="t.txt").each, seed, count))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 2**40))
def test_each_pass_gives_every_prompt_once(num_prompts: int, count: int, seed: int) -> None:
    prompts = [Prompt(str(k)) for k in range(num_prompts)]
    steps = num_prompts  # num_prompts · count prompts: `count` whole passes
    deal = deal_of(prompts, seed, count)
    dealt = [prompt.text for step in range(steps) for prompt in deal.of_step(step)]
    assert Counter(dealt) == {prompt.text: count for prompt in prompts}
    assert len(set(dealt[:num_prompts])) == num_prompts
    assert [p.text for p in deal_of(prompts, seed, count).of_step(steps - 1)] == dealt[-count:]


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**40), st.lists(st.integers(0, 200), max_size=8))
def test_the_order_is_the_one_of_the_seed_whatever_was_asked_before(
    num_prompts: int, count: int, seed: int, steps: list[int]
) -> None:
    """The formula, prompt by prompt: place k of a pass is entry k of a permutation that the pass's own seed draws."""

    def nth(place: int) -> str:
        number, offset = divmod(place, num_prompts)
        return str(np.random.default_rng(derive_seed(seed, "epoch", number)).permutation(num_prompts)[offset])

    deal = deal_of([Prompt(str(k)) for k in range(num_prompts)], seed, count)
    for step in steps:
        assert [p.text for p in deal.of_step(step)] == [nth(step * count + k) for k in range(count)]


def test_a_step_of_a_million_prompts_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def shuffled(deal: Deal, source: int, number: int, original: Any = Deal._shuffled) -> Any:
        passes.append(number)
        return original(deal, source, number)

    monkeypatch.setattr(Deal, "_shuffled", shuffled)
    deal = deal_of([Prompt("a sign")] * 1_000_000, 7, 512)
    for step in (0, 0, 1, 1952, 1953, 1954, 0, 1953):  # a pass ends in step 1953
        assert len(deal.of_step(step)) == 512
    assert passes == [0, 1]
