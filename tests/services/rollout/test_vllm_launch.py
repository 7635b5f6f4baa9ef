"""What vLLM is started with: the part that needs no vLLM."""

from __future__ import annotations

import pytest

from services.rollout.engines.vllm.launch import captured


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_graphs_are_captured_for_powers_of_two_and_the_largest_batch(max_batch: int, sizes: list[int]) -> None:
    assert captured(max_batch) == sizes
