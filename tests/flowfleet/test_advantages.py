"""Advantages against the formula, written out sample by sample in the test."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.advantages import AdvantageStd, group_advantages

rewards_and_groups = st.lists(
    st.tuples(st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3)), st.integers(0, 4)),
    min_size=1,
    max_size=40,
)


def oracle(rewards: list[float], groups: list[int], std: str, eps: float, clamp: float | None) -> list[float]:
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(peers)) == 1:
            expected.append(0.0)
            continue
        scale = {"global": statistics.pstdev(rewards) + eps, "group": statistics.pstdev(peers) + eps, "none": 1.0}[std]
        advantage = (reward - math.fsum(peers) / len(peers)) / scale
        expected.append(advantage if clamp is None else max(-clamp, min(clamp, advantage)))
    return expected


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("clamp", [5.0, 0.5, None])
@settings(max_examples=60, deadline=None)
@given(samples=rewards_and_groups)
def test_advantages_match_the_formula(std: AdvantageStd, clamp: float | None, samples: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in samples], [group for _, group in samples]
    advantages, stats = group_advantages(rewards, groups, std=std, clamp=clamp)
    np.testing.assert_allclose(advantages, oracle(rewards, groups, std, 1e-4, clamp), rtol=1e-9, atol=1e-9)
    peers = [[r for r, g in samples if g == group] for group in dict.fromkeys(groups)]
    assert stats.num_groups == len(peers)
    assert stats.group_size == pytest.approx(len(samples) / len(peers))
    assert stats.zero_std_ratio == pytest.approx(sum(len(set(p)) == 1 for p in peers) / len(peers))
    assert stats.std_mean == pytest.approx(statistics.fmean(statistics.pstdev(p) for p in peers), rel=1e-9, abs=1e-9)
    assert (stats.reward_min, stats.reward_max) == (min(rewards), max(rewards))
    assert stats.reward_mean == pytest.approx(statistics.fmean(rewards), rel=1e-12, abs=1e-12)
    assert stats.advantage_max == advantages.max()


def test_singleton_and_equal_rewards_give_exactly_zero() -> None:
    # 0.1 three times has a mean that is not 0.1 in binary: the difference must not be blown up by a tiny std.
    advantages, stats = group_advantages([0.1, 0.1, 0.1, 7.0, 1.0, 2.0], list("aaabcc"), std="group")
    assert advantages[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert advantages[4] == -advantages[5] != 0
    assert stats.zero_std_ratio == pytest.approx(2 / 3)


def test_one_sample_in_all_gives_zero() -> None:
    advantages, stats = group_advantages([3.0], ["only"])
    assert advantages.tolist() == [0.0]
    assert (stats.std_mean, stats.zero_std_ratio, stats.group_size) == (0.0, 1.0, 1.0)


def test_ddof_is_zero_unless_asked() -> None:
    population, _ = group_advantages([0.0, 1.0], [0, 0], eps=0.0, std="group")
    sample, _ = group_advantages([0.0, 1.0], [0, 0], eps=0.0, std="group", ddof=1)
    assert population.tolist() == [-1.0, 1.0]
    np.testing.assert_allclose(sample, [-math.sqrt(0.5), math.sqrt(0.5)])


def test_order_of_samples_does_not_matter() -> None:
    rewards, groups = np.arange(12.0) ** 2, np.arange(12) % 3
    order = np.random.default_rng(0).permutation(12)
    straight, _ = group_advantages(rewards, groups.tolist())
    shuffled, _ = group_advantages(rewards[order], groups[order].tolist())
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 2 \\(group 'b'\\)"):
        group_advantages([1.0, 2.0, bad], ["a", "a", "b"])


@pytest.mark.parametrize(("rewards", "groups"), [([], []), ([1.0], []), ([[1.0, 2.0]], ["a", "b"])])
def test_shapes_that_do_not_fit_are_refused(rewards: list[float], groups: list[str]) -> None:
    with pytest.raises(ValueError, match="one reward and one group id a sample"):
        group_advantages(rewards, groups)


def test_the_controllers_modules_are_free_of_torch() -> None:
    code = "import sys, flowfleet.advantages, flowfleet.algorithms.windows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
