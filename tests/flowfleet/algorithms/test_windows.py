"""Windows: where they may lie, that they depend on seed and step alone, MixGRPO's own machine, and what is refused."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.windows import Window, WindowStrategy, default_end

Strategies = Literal["fixed", "random", "progressive"]
STEPS_OF_A_TEST = 4000


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int]:
    num_steps = draw(st.integers(2, 50))
    low = draw(st.integers(0, num_steps - 1))
    high = draw(st.integers(low + 1, num_steps))
    return num_steps, draw(st.integers(1, high - low)), low, high


def starts_of(window: Window, count: int) -> list[int]:
    return [window.noisy(0, step)[0] for step in range(count)]


@pytest.mark.parametrize("strategy", ["fixed", "random", "progressive"])
@given(bounds=ranges(), seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**6), stride=st.integers(1, 5))
def test_a_window_is_contiguous_in_range_and_reproducible(
    strategy: Strategies, bounds: tuple[int, int, int, int], seed: int, step: int, stride: int
) -> None:
    num_steps, size, low, high = bounds
    window = Window(strategy=strategy, num_steps=num_steps, size=size, low=low, high=high, stride=stride)
    steps = window.noisy(seed, step)
    assert steps == tuple(range(steps[0], min(steps[0] + size, high)))
    assert low <= steps[0] <= steps[-1] < high
    assert strategy == "progressive" or len(steps) == size
    assert steps == window.trained(seed, step) == window.noisy(seed, step)
    assert set(steps) <= set(window.reachable)
    assert len(steps) <= window.most == size


def test_fixed_starts_low_and_all_takes_the_whole_range() -> None:
    assert Window(strategy="fixed", num_steps=6, size=3).noisy(0, 0) == (0, 1, 2)
    assert Window(strategy="fixed", num_steps=6, size=2, low=3).noisy(0, 0) == (3, 4)
    every = Window(strategy="all", num_steps=6)
    assert every.noisy(0, 0) == every.reachable == (0, 1, 2, 3, 4)  # noise in the last step would stay in the image
    assert every.most == 5
    assert Window(strategy="all", num_steps=6, low=1, high=6).noisy(0, 0) == (1, 2, 3, 4, 5)
    assert Window(strategy="all", num_steps=1).noisy(0, 0) == (0,)


def test_random_starts_are_uniform_over_steps_and_differ_by_seed() -> None:
    window = Window(strategy="random", num_steps=10, size=2, low=0, high=5)
    starts = [window.noisy(1, step)[0] for step in range(STEPS_OF_A_TEST)]
    counts = Counter(starts)
    assert sorted(counts) == [0, 1, 2, 3]  # the common recipe of window 2 in [0, 5]
    assert all(abs(count - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    assert [window.noisy(2, step)[0] for step in range(STEPS_OF_A_TEST)] != starts
    assert window.reachable == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("strategy", "num_steps", "size", "low", "end"),
    [
        ("random", 10, 2, 0, 5),  # Flow-GRPO-Fast and verl-omni
        ("random", 10, 7, 0, 7),
        ("random", 11, 2, 4, 6),
        ("random", 6, 2, 0, 3),
        ("random", 2, 1, 0, 1),
        ("random", 3, 3, 0, 2),  # does not fit, and is refused
        ("progressive", 25, 4, 0, 23),  # MixGRPO
        ("progressive", 5, 4, 0, 4),
        ("progressive", 2, 1, 0, 1),
        ("all", 10, 2, 0, 9),
        ("all", 1, 2, 0, 1),
        ("fixed", 10, 2, 0, 9),
        ("fraction", 16, 2, 0, 15),
    ],
)
def test_where_windows_end_unless_the_job_says(
    strategy: WindowStrategy, num_steps: int, size: int, low: int, end: int
) -> None:
    assert default_end(strategy, num_steps=num_steps, size=size, low=low) == end


@given(
    strategy=st.sampled_from(["fixed", "random", "progressive", "all", "fraction"]),
    num_steps=st.integers(2, 40),
    size=st.integers(1, 40),
    low=st.integers(0, 40),
)
def test_the_default_range_leaves_the_last_step_out_and_holds_what_can_be_held(
    strategy: WindowStrategy, num_steps: int, size: int, low: int
) -> None:
    if low + size > num_steps - 1:
        return
    window = Window(strategy=strategy, num_steps=num_steps, size=size, low=low)
    assert window.reachable[-1] < num_steps - 1
    assert window.noisy(3, 4)


def test_progressive_moves_up_and_starts_over() -> None:
    window = Window(strategy="progressive", num_steps=10, size=2, high=5, shift_every=3)
    assert starts_of(window, 18) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0, 0]
    assert [window.noisy(0, step) for step in (9, 12)] == [(3, 4), (4,)]
    stay = Window(strategy="progressive", num_steps=10, size=2, high=5, shift_every=3, at_end="stay")
    assert starts_of(stay, 18) == [0, 0, 0, 1, 1, 1, 2, 2, 2] + [3] * 9
    assert stay.noisy(0, 10**9) == (3, 4)


def test_progressive_starts_over_at_low_whatever_its_stride() -> None:
    """MixGRPO's 25 steps in windows of four that do not overlap."""
    window = Window(strategy="progressive", num_steps=25, size=4, stride=4)
    assert starts_of(window, 9) == [0, 4, 8, 12, 16, 20, 0, 4, 8]
    assert window.noisy(0, 5) == (20, 21, 22)  # cut at N - 2
    wide = Window(strategy="progressive", num_steps=25, size=4, stride=4, high=24)
    assert starts_of(wide, 9) == [0, 4, 8, 12, 16, 20, 0, 4, 8]
    stay = Window(strategy="progressive", num_steps=25, size=4, stride=4, at_end="stay")
    assert starts_of(stay, 9) == [0, 4, 8, 12, 16, 19, 19, 19, 19]


def their_windows(
    pace: str, *, most: int, least: int, group: int, step: int, end: int, begin: int, after: int, rate: float
) -> Iterator[list[int]]:
    """MixGRPO's state machine, one training step after the other: a counter that moves the window when it reaches what
    the present start asks for, and goes back to the first start when the window has passed the end.

    It lets the window stand at the end itself, where no step is left to train; such a start is left out here.
    """
    current, counter = begin, 0
    while True:
        if current < end:
            yield list(range(current, min(current + group, end)))
        if pace == "decay":
            share = current / end
            needed: float = max(least, int(most * (1 - share) + least * share))
        elif pace == "exp_decay":
            needed = math.ceil(most * math.exp(-rate * max(0, current - after)))
        else:
            needed = most
        counter += 1
        if counter >= needed:
            current, counter = current + step, 0
        if current > end:
            current, counter = begin, 0


@pytest.mark.parametrize("pace", ["constant", "decay", "exp_decay"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_paces_are_those_of_mix_grpos_own_machine(pace: Any, data: st.DataObject) -> None:
    end = data.draw(st.integers(1, 30), "end")
    low = data.draw(st.integers(0, end - 1), "low")
    size, stride = data.draw(st.integers(1, end - low), "size"), data.draw(st.integers(1, 6), "stride")
    most = data.draw(st.integers(1, 12), "most")
    least = data.draw(st.none() | st.integers(1, most), "least")
    after, rate = data.draw(st.integers(0, 20), "after"), data.draw(st.floats(0.0, 1.0), "rate")
    window = Window(
        strategy="progressive",
        num_steps=end + 2,
        size=size,
        low=low,
        high=end,
        stride=stride,
        shift_every=most,
        pace=pace,
        pace_min=least,
        pace_from=after,
        pace_rate=rate,
    )
    theirs = their_windows(
        pace,
        most=most,
        least=max(1, most // 4) if least is None else least,
        group=size,
        step=stride,
        end=end,
        begin=low,
        after=after,
        rate=rate,
    )
    for step, expected in enumerate(itertools.islice(theirs, 200)):
        assert list(window.noisy(7, step)) == expected
        assert set(expected) <= set(window.reachable)


def test_the_decays_that_mix_grpo_publishes() -> None:
    """25 steps, windows of 4: 10 training steps at the first start and 1 at the end; 25 up to step 13, then less."""
    decay = Window(strategy="progressive", num_steps=25, size=4, shift_every=10, pace="decay", pace_min=1)
    stays = [len(list(same)) for _, same in itertools.groupby(starts_of(decay, 130))]
    assert stays[:23] == [int(10 * (1 - t / 23) + t / 23) for t in range(23)]
    exp = Window(strategy="progressive", num_steps=25, size=4, shift_every=25, pace="exp_decay")
    stays = [len(list(same)) for _, same in itertools.groupby(starts_of(exp, 600))]
    assert stays[:23] == [25] * 14 + [math.ceil(25 * math.exp(-0.1 * (t - 13))) for t in range(14, 23)]


def test_listed_steps_are_all_noisy_and_all_trained() -> None:
    window = Window(strategy="listed", num_steps=10, steps=(0, 3, 9))
    assert window.noisy(1, 5) == window.trained(1, 5) == window.reachable == (0, 3, 9)
    assert (window.most, window.end) == (3, 10)


def test_a_fraction_is_drawn_from_all_noisy_steps() -> None:
    """DanceGRPO: noise in all 15 steps but the last of 16, a random 60 % of them trained."""
    window = Window(strategy="fraction", num_steps=16, fraction=0.6)
    assert window.noisy(1, 0) == window.reachable == tuple(range(15))
    drawn = [window.trained(1, step) for step in range(STEPS_OF_A_TEST)]
    assert {len(steps) for steps in drawn} == {9} == {window.most}
    assert all(list(steps) == sorted(set(steps)) and set(steps) <= set(range(15)) for steps in drawn)
    counts = Counter(index for steps in drawn for index in steps)
    deviation = (STEPS_OF_A_TEST * 0.6 * 0.4) ** 0.5
    assert all(abs(counts[index] - STEPS_OF_A_TEST * 0.6) < 5 * deviation for index in range(15))
    assert drawn[0] == window.trained(1, 0) != window.trained(2, 0)
    assert Window(strategy="fraction", num_steps=4, fraction=0.1).most == 1
    assert Window(strategy="fraction", num_steps=4, fraction=1.0).trained(1, 1) == (0, 1, 2)
