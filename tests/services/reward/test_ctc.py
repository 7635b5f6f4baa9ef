from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.reward.scorers.ocr.ctc import log_probability


def probabilities(seed: int, num_frames: int, num_symbols: int) -> NDArray[np.float64]:
    frames: NDArray[np.float64] = np.random.default_rng(seed).random((num_frames, num_symbols)) ** 3
    frames /= frames.sum(axis=1, keepdims=True)
    return frames


def by_enumeration(frames: NDArray[np.float64], target: tuple[int, ...]) -> float:
    """The definition: the sum over all paths that collapse to the target; symbol 0 is the blank."""
    total = 0.0
    for path in itertools.product(range(frames.shape[1]), repeat=len(frames)):
        collapsed = tuple(symbol for symbol, _ in itertools.groupby(path) if symbol)
        if collapsed == target:
            total += math.prod(frames[t, symbol] for t, symbol in enumerate(path))
    return total


def ours(frames: NDArray[np.float64], target: tuple[int, ...]) -> float:
    repeats = np.array([position > 0 and target[position - 1] == symbol for position, symbol in enumerate(target)])
    return math.exp(log_probability(frames[:, list(target)], repeats, frames[:, 0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.lists(st.integers(1, 2), min_size=1, max_size=4))
def test_forward_recursion_is_the_sum_over_all_paths(seed: int, num_frames: int, target: list[int]) -> None:
    frames = probabilities(seed, num_frames, 3)
    assert ours(frames, tuple(target)) == pytest.approx(by_enumeration(frames, tuple(target)), rel=1e-12, abs=1e-300)


def test_too_few_frames_are_impossible() -> None:
    assert ours(probabilities(0, 2, 3), (1, 1)) == 0.0
    assert ours(probabilities(0, 3, 3), (1, 1)) > 0.0


def test_long_lines_do_not_underflow() -> None:
    frames = np.full((4000, 2), 0.01)
    value = log_probability(frames[:, 1:], np.array([False]), frames[:, 0])
    runs = 4000 * 4001 // 2
    assert value == pytest.approx(4000 * math.log(0.01) + math.log(runs), rel=1e-12)
