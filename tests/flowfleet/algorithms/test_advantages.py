"""Advantages against the formula, written out sample by sample in the test."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowfleet.algorithms.advantages import (
    AdvantageStd,
    combined_advantages,
    group_advantages,
    shaped_by_diversity,
    uncertain,
)

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


several = st.lists(
    st.tuples(st.integers(-20, 20), st.integers(-20, 20), st.integers(-20, 20), st.integers(0, 3)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=40, deadline=None)
@given(samples=several, std=st.sampled_from(["global", "group", "none"]))
def test_a_sum_of_rewards_has_the_advantages_of_their_weighted_sum(
    samples: list[tuple[int, int, int, int]], std: AdvantageStd
) -> None:
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    rewards = {name: [float(sample[k]) for sample in samples] for k, name in enumerate(weights)}
    groups = [sample[3] for sample in samples]
    total = [1.0 * a + 0.5 * b - 2.0 * c for a, b, c, _ in samples]  # exact: small integers and halves
    combined, stats = combined_advantages(rewards, weights, groups, combination="sum", std=std)
    alone, alone_stats = group_advantages(total, groups, std=std)
    assert combined.tolist() == alone.tolist()
    assert stats == alone_stats


@settings(max_examples=60, deadline=None)
@given(samples=several, clamp=st.sampled_from([None, 0.5]))
def test_normalized_rewards_match_the_formula(samples: list[tuple[int, int, int, int]], clamp: float | None) -> None:
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    rewards = {name: [sample[k] / 8 for sample in samples] for k, name in enumerate(weights)}
    groups = [sample[3] for sample in samples]
    mixed = [0.0] * len(samples)
    for name, weight in weights.items():
        own = oracle(rewards[name], groups, "group", 1e-4, None)
        mixed = [value + weight * part for value, part in zip(mixed, own, strict=True)]
    mean, spread = math.fsum(mixed) / len(mixed), statistics.pstdev(mixed)
    expected = [(value - mean) / (spread + 1e-4) for value in mixed]
    if clamp is not None:
        expected = [max(-clamp, min(clamp, value)) for value in expected]
    advantages, stats = combined_advantages(rewards, weights, groups, combination="normalized", clamp=clamp)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    total = [a / 8 + b / 16 - c / 4 for a, b, c, _ in samples]
    assert stats.reward_mean == pytest.approx(math.fsum(total) / len(total), abs=1e-12)
    assert (stats.reward_min, stats.reward_max) == (min(total), max(total))
    assert stats.advantage_max == advantages.max()


@settings(max_examples=60, deadline=None)
@given(samples=several, std=st.sampled_from(["global", "group"]), clamp=st.sampled_from([None, 0.5]))
def test_separate_rewards_match_the_formula(
    samples: list[tuple[int, int, int, int]], std: AdvantageStd, clamp: float | None
) -> None:
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    rewards = {name: [sample[k] / 8 for sample in samples] for k, name in enumerate(weights)}
    groups = [sample[3] for sample in samples]
    expected = [0.0] * len(samples)
    for name, weight in weights.items():
        own = oracle(rewards[name], groups, std, 1e-4, None)
        expected = [value + weight * part for value, part in zip(expected, own, strict=True)]
    if clamp is not None:
        expected = [max(-clamp, min(clamp, value)) for value in expected]
    advantages, stats = combined_advantages(rewards, weights, groups, combination="separate", std=std, clamp=clamp)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    assert stats.advantage_min == advantages.min()


def test_separate_rewards_as_mix_grpo_adds_them() -> None:
    """Their `advantage_aggr`: torch's std (ddof 1) of each group plus 1e-8, weighted and added, and nothing more."""
    drawn = np.random.default_rng(18).normal(size=(4, 3, 12)) * np.array([5.0, 1.0, 30.0, 2.0])[:, None, None]
    weights = dict(zip("abcd", (1.0, 1.0, 0.5, -0.25), strict=True))
    theirs = sum(
        weight * (values - values.mean(-1, keepdims=True)) / (values.std(-1, ddof=1, keepdims=True) + 1e-8)
        for values, weight in zip(drawn, weights.values(), strict=True)
    )
    rewards, groups = (
        {name: values.ravel() for name, values in zip("abcd", drawn, strict=True)},
        [*np.repeat(range(3), 12)],
    )
    exact, _ = combined_advantages(
        rewards, weights, groups, combination="separate", std="group", eps=1e-8, ddof=1, clamp=None
    )
    np.testing.assert_allclose(exact, np.ravel(theirs), rtol=1e-12)
    ours, _ = combined_advantages(rewards, weights, groups, combination="separate", std="group", clamp=None)
    np.testing.assert_allclose(ours / np.ravel(theirs), np.sqrt(12 / 11), rtol=2e-3)  # ddof 0 and eps 1e-4
    gdpo, _ = combined_advantages(rewards, weights, groups, combination="normalized", clamp=None)
    np.testing.assert_allclose(ours, gdpo * (ours.std() + 1e-4), rtol=1e-9)


def test_of_one_reward_separate_is_the_sum_times_its_weight() -> None:
    rewards, groups = {"a": [0.0, 1.0, 3.0, 3.5, 9.0]}, [0, 0, 0, 1, 1]
    separate, _ = combined_advantages(rewards, {"a": 2.0}, groups, combination="separate", clamp=None)
    alone, _ = group_advantages(rewards["a"], groups, clamp=None)
    np.testing.assert_allclose(separate, 2 * alone, rtol=1e-12)


def test_a_reward_that_some_have_not_is_0_for_them_when_separate() -> None:
    rewards, present = {"a": [0.0, 1.0, 0.5], "b": [4.0, 0.0, 2.0]}, {"a": [True] * 3, "b": [True, False, True]}
    advantages, _ = combined_advantages(
        rewards, {"a": 0.0, "b": 1.0}, [0, 0, 0], combination="separate", std="group", present=present
    )
    np.testing.assert_allclose(advantages, [1 / 1.0001, 0.0, -1 / 1.0001], rtol=1e-12)


def test_normalized_rewards_count_alike_whatever_their_spread() -> None:
    small, large = [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1e6, 1e6]
    rewards, weights = {"small": small, "large": large}, {"small": 1.0, "large": 1.0}
    normalized, _ = combined_advantages(rewards, weights, [0] * 4, combination="normalized", eps=0.0)
    np.testing.assert_allclose(normalized, [-math.sqrt(2), 0, 0, math.sqrt(2)], atol=1e-9)
    summed, _ = combined_advantages(rewards, weights, [0] * 4, combination="sum", eps=0.0)
    assert abs(summed[0] - summed[1]) < 1e-5


def test_normalized_groups_without_any_difference_give_exactly_zero() -> None:
    rewards = {"a": [0.1, 0.1, 0.1, 1.0, 2.0, 7.0], "b": [0.3, 0.3, 0.3, 5.0, 1.0, 7.0]}
    advantages, stats = combined_advantages(rewards, {"a": 1.0, "b": 0.7}, list("aaabbc"), combination="normalized")
    assert advantages[[0, 1, 2, 5]].tolist() == [0.0] * 4
    assert advantages[3] != 0
    assert stats.zero_std_ratio == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({"a": [1.0, 2.0]}, {"b": 1.0}, "one weight a reward"),
        ({}, {}, "one weight a reward"),
        ({"a": [1.0, 2.0], "b": [1.0, math.nan]}, {"a": 1.0, "b": 0.0}, "b reward 1 \\(group 0\\)"),
        ({"a": [1.0]}, {"a": 1.0}, "one reward and one group id"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(
    rewards: dict[str, list[float]], weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        combined_advantages(rewards, weights, [0, 0])


def test_the_controllers_modules_are_free_of_torch() -> None:
    rooms = {"algorithms": "advantages preferences registry windows", "job": "rules spec"}
    imports = ", ".join(f"flowfleet.{room}.{module}" for room, names in rooms.items() for module in names.split())
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_diversity_shapes_what_is_better_than_the_group() -> None:
    """GARDO's code: A d / mean of the group's d where A > 0."""
    rng = np.random.default_rng(5)
    advantages, diversity, groups = rng.normal(size=12), rng.uniform(size=12), [0, 1, 2] * 4
    means = {
        group: np.mean([d for d, other in zip(diversity, groups, strict=True) if other == group]) for group in range(3)
    }
    wanted = [
        value * d / means[group] if value > 0 else value
        for value, d, group in zip(advantages, diversity, groups, strict=True)
    ]
    np.testing.assert_allclose(shaped_by_diversity(advantages, diversity, groups), wanted, rtol=1e-12)
    limited = shaped_by_diversity(advantages, diversity, groups, clamp=0.5)
    np.testing.assert_allclose(limited, np.clip(wanted, -0.5, 0.5), rtol=1e-12)
    equal = shaped_by_diversity(advantages, np.zeros(12), groups)
    np.testing.assert_array_equal(equal, advantages)


def test_the_most_doubted_samples_win_by_the_total_and_lose_by_the_others() -> None:
    """GARDO's equation 7, pair by pair, and the quantile of what is not negative."""
    rng = np.random.default_rng(8)
    total, first, second = (rng.integers(0, 6, size=30).astype(float) for _ in range(3))

    def wins(values: NDArray[np.float64]) -> list[float]:
        return [sum(own > other for other in values) / len(values) for own in values]

    doubt = np.array(wins(total)) - (np.array(wins(first)) + np.array(wins(second))) / 2
    for share in (0.1, 0.5):
        wanted = (doubt >= np.quantile(doubt[doubt >= 0], 1 - share)) & (doubt > 0)
        np.testing.assert_array_equal(uncertain(total, [first, second], share), wanted)
        assert 0 < wanted.sum() < 15
    assert not uncertain(total, [total], 0.1).any()  # no doubt anywhere
    best = np.argmax(total)
    second[best] = np.nan  # beats none: doubted
    assert uncertain(total, [second], 0.2)[best]
