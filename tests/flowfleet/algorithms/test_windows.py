"""Windows: where they may lie, that they depend on seed and step alone, and what is refused."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.algorithms.windows import WindowStrategy, window


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int]:
    num_steps = draw(st.integers(2, 50))
    low = draw(st.integers(0, num_steps - 1))
    high = draw(st.integers(low + 1, num_steps))
    return num_steps, draw(st.integers(1, high - low)), low, high


@pytest.mark.parametrize("strategy", ["fixed", "random", "progressive"])
@given(bounds=ranges(), seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**6), stride=st.integers(1, 5))
def test_a_window_is_contiguous_in_range_and_reproducible(
    strategy: WindowStrategy, bounds: tuple[int, int, int, int], seed: int, step: int, stride: int
) -> None:
    num_steps, size, low, high = bounds
    steps = window(strategy, num_steps=num_steps, size=size, low=low, high=high, seed=seed, step=step, stride=stride)
    assert steps == tuple(range(steps[0], steps[0] + size))
    assert low <= steps[0]
    assert steps[-1] < high
    assert steps == window(
        strategy, num_steps=num_steps, size=size, low=low, high=high, seed=seed, step=step, stride=stride
    )


def test_fixed_starts_low_and_all_takes_the_whole_range() -> None:
    assert window("fixed", num_steps=6, size=3) == (0, 1, 2)
    assert window("fixed", num_steps=6, size=2, low=3) == (3, 4)
    assert window("all", num_steps=6) == (0, 1, 2, 3, 4)  # noise in the last step would stay in the image
    assert window("all", num_steps=6, low=1, high=6) == (1, 2, 3, 4, 5)
    assert window("all", num_steps=1) == (0,)


def test_random_starts_are_uniform_over_steps_and_differ_by_seed() -> None:
    starts = [window("random", num_steps=10, size=2, low=0, high=5, seed=1, step=step)[0] for step in range(4000)]
    counts = Counter(starts)
    assert sorted(counts) == [0, 1, 2, 3]  # the common recipe of window 2 in [0, 5]
    assert all(abs(count - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    other = [window("random", num_steps=10, size=2, low=0, high=5, seed=2, step=step)[0] for step in range(4000)]
    assert other != starts


def test_progressive_moves_up_and_wraps() -> None:
    starts = [window("progressive", num_steps=10, size=2, high=5, step=step, shift_every=3)[0] for step in range(15)]
    assert starts == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0, 0]
    starts = [window("progressive", num_steps=10, size=2, low=1, high=8, step=step, stride=2)[0] for step in range(4)]
    assert starts == [1, 3, 5, 1]


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        ("fixed", {"num_steps": 6, "size": 0}, "size must be 1 to 5"),
        ("random", {"num_steps": 6, "size": 3, "low": 4}, "size must be 1 to 1"),
        ("all", {"num_steps": 6, "high": 7}, "high 7"),
        ("all", {"num_steps": 6, "low": 5, "high": 5}, "low is 5"),
        ("fixed", {"num_steps": 6, "size": 2, "low": -1}, "low is -1"),
        ("progressive", {"num_steps": 6, "size": 2, "stride": 0}, "at least 1"),
        ("sometimes", {"num_steps": 6}, "choose one of fixed, random, progressive, all"),
    ],
)
def test_bad_windows_are_refused(strategy: WindowStrategy, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window(strategy, **arguments)
