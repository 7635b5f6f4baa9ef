"""What raw scores count for: against sums in exact fractions and advantages written out by the formula."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.spec import RewardPart, parse_job
from services.controller.job.credit import Credit, credits_of
from services.controller.job.machine.batch import Scored
from services.controller.rewards.composition import clipped, columns, compose, weight_at
from services.controller.rewards.rows import reward_row

EPS = 1e-4
numbers = st.floats(-100, 100, allow_nan=False).map(lambda number: round(number, 5))
"""A weight is 0 or counts: settings refuse those that are tiny."""
curves = st.lists(st.integers(0, 1000), min_size=1, max_size=5, unique=True).flatmap(
    lambda steps: st.tuples(*(st.tuples(st.just(step), numbers) for step in sorted(steps)))
)


def parts(**rewards: dict[str, Any]) -> dict[str, RewardPart]:
    return {name: RewardPart.model_validate(part) for name, part in rewards.items()}


@given(curves, st.integers(0, 1100), numbers)
def test_a_curve_is_linear_between_its_points_and_constant_outside(
    curve: tuple[tuple[int, float], ...], step: int, weight: float
) -> None:
    expected = weight * float(np.interp(step, [at for at, _ in curve], [factor for _, factor in curve]))
    assert weight_at(RewardPart(weight=weight, curve=curve), step) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=4), st.integers(0, 50))
def test_a_total_is_the_weighted_sum_of_clipped_scores(
    rows: list[tuple[float, float, float, float]], step: int
) -> None:
    """Against exact fractions."""
    rewards, scores, expected = {}, {}, Fraction(0)
    for number, (score, weight, low, width) in enumerate(rows):
        limits = (low, low + abs(width) + 1.0)
        rewards[str(number)] = RewardPart(weight=weight, clip=limits, curve=((0, 1.0), (50, 0.0)))
        scores[str(number)] = score
        kept = min(max(Fraction(score), Fraction(limits[0])), Fraction(limits[1]))
        expected += Fraction(weight) * kept * (1 - Fraction(step, 50))
    total = compose(rewards, step, scores).total
    assert total == pytest.approx(float(expected), rel=1e-9, abs=1e-7)


def test_a_gate_goes_by_the_raw_score_and_a_mask_before_a_zero() -> None:
    rewards = parts(
        ocr={"gate": {"above": 2.0}, "clip": [0, 1]}, quality={"weight": 0, "gate": {"below": 0.2, "action": "mask"}}
    )
    found = {
        scores: compose(rewards, 0, {"ocr": scores[0], "quality": scores[1]})
        for scores in [(1.5, 0.2), (2.5, 0.2), (2.5, 0.1), (1.5, 0.1)]
    }
    assert [(one.total, one.reason, one.gated_by) for one in found.values()] == [
        (1.0, "", ""),  # a limit itself is no side
        (0.0, "", "ocr"),
        (None, "gated_quality", "quality"),
        (None, "gated_quality", "quality"),
    ]


def test_what_was_skipped_is_no_zero() -> None:
    rewards = parts(a={"weight": -2.0}, b={"weight": 3.0}, watched={"weight": 0.0})
    assert compose(rewards, 0, {"a": 0.5, "watched": 1.0}).total == -1.0
    nothing = compose(rewards, 0, {"watched": 1.0})
    assert (nothing.total, nothing.reason) == (None, "no_score_a")
    rising = parts(a={"curve": [[0, 0], [10, 1]]}, b={})
    assert compose(rising, 0, {"a": 1.0}).reason == "no_score_b", "a weighs nothing yet"
    assert compose(rising, 1, {"a": 1.0}).total == pytest.approx(0.1)


def test_an_overflow_is_no_score() -> None:
    assert compose(parts(a={"weight": 1e6}), 0, {"a": 1e308}).reason == "non_finite_sum"


def test_columns_put_the_mean_of_the_group_where_a_score_is_missing() -> None:
    rewards = parts(a={}, b={"weight": 2.0, "clip": [0, 10]}, c={})
    scores = [{"a": 1.0, "b": 2.0}, {"a": 1.0}, {"a": 1.0, "b": 40.0}, {"a": 3.0}]
    found = columns([rewards], np.zeros(4, dtype=np.int64), 0, scores, [0, 0, 0, 1])
    np.testing.assert_array_equal(found.values["b"], [2, 0, 10, 0])
    np.testing.assert_array_equal(found.present["b"], [True, False, True, False])
    np.testing.assert_array_equal(found.values["c"], [0, 0, 0, 0])
    # b counts 6 where it is missing: the mean of its group, or of the step where the group has none
    np.testing.assert_array_equal(found.totals(), [5, 13, 21, 15])


def spec(combination: str, rewards: dict[str, Any], **algorithm: Any) -> Any:
    algorithm = {"reward_combination": combination, "advantage_clamp": None} | algorithm
    job = {"model": {"path": "m"}, "data": {"train": "t.txt"}, "rewards": rewards, "algorithm": algorithm}
    return parse_job(job | {"rollout": {"group_size": 4}})


def credits(job: Any, scores: list[dict[str, float]], step: int) -> list[Credit]:
    totals = [compose(job.rewards, step, one).total for one in scores]
    rows = [Scored(k // 4, k % 4, total or 0.0, one) for k, (total, one) in enumerate(zip(totals, scores, strict=True))]
    return credits_of(job, job.rewards, step, rows)[0]


def gdpo(columns: list[np.ndarray[Any, Any]], weights: list[float]) -> np.ndarray[Any, Any]:
    """Written out: groups of four, NaN where there is no score."""
    total = np.zeros(len(columns[0]))
    for column, weight in zip(columns, weights, strict=True):
        for start in range(0, len(column), 4):
            group = column[start : start + 4]
            if np.isfinite(group).any() and np.nanstd(group) > 0:
                own = (group - np.nanmean(group)) / (np.nanstd(group) + EPS)
                total[start : start + 4] += weight * np.nan_to_num(own)
    return np.asarray(total / (total.std() + EPS))


REWARDS = {
    "ocr": {"clip": [0, 1], "curve": [[0, 1], [10, 3]]},
    "speed": {"weight": -0.01},
    "quality": {"weight": 0, "gate": {"below": 0.5}},
}
OCR = [0.2, 0.9, 1.7, 0.4, 0.1, 0.1, 0.3, 0.6]
SPEED = [10.0, 30.0, 20.0, 90.0, 5.0, 5.0, 70.0, 40.0]
QUALITY = [0.9, 0.9, 0.9, 0.1, 0.9, 0.4, 0.6, 0.9]
SCORES = [dict(zip(REWARDS, row, strict=True)) for row in zip(OCR, SPEED, QUALITY, strict=True)]
COUNTED = np.array([0.2, 0.9, 1.0, 0.0, 0.1, 0.0, 0.3, 0.6])  # clipped; 0 where the gate is shut
SLOW = np.array([10.0, 30.0, 20.0, 0.0, 5.0, 0.0, 70.0, 40.0])


def test_a_sum_respects_clip_curve_and_gate() -> None:
    found = credits(spec("sum", REWARDS), SCORES, step=5)
    total = 2 * COUNTED - 0.01 * SLOW
    centered = total - np.repeat(total.reshape(2, 4).mean(axis=1), 4)
    np.testing.assert_allclose([one.advantage for one in found], centered / (total.std() + EPS), rtol=1e-12)
    np.testing.assert_allclose([one.reward for one in found], total, atol=1e-12)


def test_normalized_rewards_respect_clip_curve_and_gate() -> None:
    found = credits(spec("normalized", REWARDS), SCORES, step=5)
    expected = gdpo([COUNTED, SLOW], [2.0, -0.01])
    np.testing.assert_allclose([one.advantage for one in found], expected, rtol=1e-9)


@pytest.mark.parametrize("left", [[], [1], [0, 1, 2], [0, 1, 2, 3], [1, 6]])
def test_a_skipped_reward_is_neutral_where_rewards_are_normalized(left: list[int]) -> None:
    rewards = {"ocr": {}, "speed": {"weight": -0.5, "on_failure": "skip"}}
    scores = [{"ocr": ocr, "speed": speed} for ocr, speed in zip(OCR, SPEED, strict=True)]
    scores = [one if k not in left else {"ocr": one["ocr"]} for k, one in enumerate(scores)]
    speed = np.where(np.isin(range(8), left), np.nan, SPEED)
    with np.errstate(invalid="ignore"):
        expected = gdpo([np.array(OCR), np.where(np.isnan(speed), np.nan, speed)], [1.0, -0.5])
    found = credits(spec("normalized", rewards), scores, step=0)
    np.testing.assert_allclose([one.advantage for one in found], expected, rtol=1e-9, atol=1e-12)


def test_a_skipped_reward_prefers_nobody_in_a_sum_nor_in_pairs() -> None:
    """A sample without its second reward, worth 100 to all others, is not the worst for that."""
    rewards = {"a": {}, "b": {"on_failure": "skip"}}
    scores = [{"a": 0.1, "b": 100.0}, {"a": 0.2}, {"a": 0.3, "b": 100.0}, {"a": 0.4, "b": 100.0}]
    found = [one.advantage for one in credits(spec("sum", rewards), scores, step=0)]
    a = np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(found, (a - a.mean()) / (a.std() + EPS), rtol=1e-9)
    job = parse_job(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rewards": rewards, "algorithm": {"name": "online_dpo"}}
    )
    pair = credits(job, scores, step=0)
    assert [one.index for one in pair] == [3, 0]


def test_a_row_shows_raw_scores_and_how_many_are_missing() -> None:
    row = reward_row("critic", ["b", "a"], [{"a": 1.0}, {"a": 4.0}, {"a": 1.0}])
    assert row["critic/rewards/a/mean"] == 2.0
    assert row["critic/rewards/a/std"] == pytest.approx(np.sqrt(2.0))
    assert (row["critic/rewards/a/missing"], row["critic/rewards/b/missing"]) == (0.0, 3.0)
    assert np.isnan(row["critic/rewards/b/mean"])


def test_clipping_leaves_what_is_inside() -> None:
    part = RewardPart(clip=(-1.0, 1.0))
    assert [clipped(part, score) for score in (-2.0, -1.0, 0.5, 3.0)] == [-1.0, -1.0, 0.5, 1.0]


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "-a", "a b", "ä", "a" * 64])
def test_a_rewards_name_is_part_of_other_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"^rewards: rename .*letters, digits, '_' and '-'.*`service`"):
        spec("sum", {name: {}})
    assert set(spec("sum", {"a-b_9": {"service": "a.b"}, "std": {}}).rewards) == {"a-b_9", "std"}
