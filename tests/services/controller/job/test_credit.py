"""What a step's samples count for: numbers by hand and by the formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowfleet.algorithms.advantages import AdvantageStats
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.proto import common_pb2
from flowfleet.rewards.requests import MAX_SCORE
from services.controller.job import credit, requests
from services.controller.job.credit import Credit
from services.controller.job.machine import events as ev
from services.controller.job.machine.batch import Scored
from services.controller.prompts.mixture import Mixture
from services.controller.rewards.job_rewards import SampleScore


def spec_of(algorithm: dict[str, Any], rewards: dict[str, Any], **parts: Any) -> JobSpec:
    data = {"train": "pairs.jsonl"}
    return parse_job({"model": {"path": "m"}, "algorithm": algorithm, "rewards": rewards, "data": data, **parts})


def credits_of(spec: JobSpec, rows: list[Scored], step: int = 0) -> tuple[list[Credit], AdvantageStats]:
    return credit.credits_of(spec, spec.rewards, step, rows)


def scored(*rows: tuple[int, int, float], names: tuple[str, ...] = ("ocr",)) -> list[Scored]:
    return [Scored(group, index, score, dict.fromkeys(names, score)) for group, index, score in rows]


TWO_GROUPS = [(0, 0, 1.0), (0, 1, 3.0), (1, 0, 5.0), (1, 2, 5.0)]


def test_advantages_divide_by_the_std_of_the_batch() -> None:
    credits, stats = credits_of(spec_of({"advantage_clamp": None}, {"ocr": {}}), scored(*TWO_GROUPS))
    scale = float(np.std([1.0, 3.0, 5.0, 5.0])) + 1e-4
    assert [(credit.group, credit.index, credit.reward) for credit in credits] == TWO_GROUPS
    expected = [-1 / scale, 1 / scale, 0.0, 0.0]
    assert [credit.advantage for credit in credits] == pytest.approx(expected, rel=1e-12)
    assert (stats.reward_mean, stats.zero_std_ratio, stats.advantage_max) == (3.5, 0.5, 1 / scale)


def test_the_clamp_may_be_left_out() -> None:
    samples = scored(*((0, index, 0.0) for index in range(99)), (0, 99, 1.0))
    largest = {
        clamp: max(c.advantage for c in credits_of(spec_of({"advantage_clamp": clamp}, {"ocr": {}}), samples)[0])
        for clamp in (5.0, None)
    }
    assert largest[5.0] == 5.0
    assert largest[None] == pytest.approx(0.99 / (np.sqrt(0.01 * 0.99) + 1e-4))


def test_a_reward_is_weighted_in_both_combinations() -> None:
    samples = [Scored(0, 0, 0.0, {"a": 0.0, "b": 10.0}), Scored(0, 1, 0.0, {"a": 1.0, "b": 0.0})]
    rewards = {"a": {"weight": 3.0}, "b": {"weight": 0.5}}
    by_sum, stats = credits_of(spec_of({"reward_combination": "sum"}, rewards), samples)
    by_each, _ = credits_of(spec_of({"reward_combination": "normalized"}, rewards), samples)
    assert by_sum[0].advantage > 0 > by_sum[1].advantage  # 5 against 3
    assert by_each[0].advantage < 0 < by_each[1].advantage  # 0.5 against 3, each of std 1
    assert (stats.reward_min, stats.reward_max) == (3.0, 5.0)


def with_kl(rows: list[Scored], kls: list[float]) -> list[Scored]:
    return [replace(row, reference_kl=kl) for row, kl in zip(rows, kls, strict=True)]


def test_the_kl_is_subtracted_from_the_total_before_advantages() -> None:
    rows, kls = scored(*TWO_GROUPS), [0.5, 2.0, 4.0, 0.25]
    spec = spec_of({"kl_reward": 0.4, "advantage_clamp": None}, {"ocr": {"weight": 2.0}})
    credits, stats = credits_of(spec, with_kl(rows, kls))
    totals = np.array([2 * row.score - 0.4 * kl for row, kl in zip(rows, kls, strict=True)])
    centered = totals - np.repeat([totals[:2].mean(), totals[2:].mean()], 2)
    expected = centered / (totals.std() + 1e-4)
    assert [credit.advantage for credit in credits] == pytest.approx(expected.tolist(), rel=1e-12)
    assert [credit.reward for credit in credits] == [row.score for row in rows]  # people see the reward itself
    assert stats.reward_mean == pytest.approx(totals.mean())
    assert stats.zero_std_ratio == 0  # the KL tells two samples of equal reward apart


def test_samples_that_are_older_than_the_kl_have_none() -> None:
    rewards: dict[str, Any] = {"ocr": {}}
    with_setting, _ = credits_of(spec_of({"kl_reward": 0.4}, rewards), scored(*TWO_GROUPS))
    without, _ = credits_of(spec_of({}, rewards), with_kl(scored(*TWO_GROUPS), [1.0, 2.0, 3.0, 4.0]))
    assert with_setting == without
    summed = [Scored(*row) for row in TWO_GROUPS]  # and old ledgers sums alone
    assert credits_of(spec_of({"kl_reward": 0.4}, rewards), summed)[0] == without


def test_pairs_go_by_the_total_less_the_kl() -> None:
    rows = with_kl(scored((0, 0, 1.0), (0, 1, 0.9), (0, 2, 0.0)), [1.0, 0.0, 0.0])
    algorithm = {"name": "online_dpo", "kl_reward": 0.5}
    spec = spec_of(algorithm, {"ocr": {}}, rollout={"group_size": 3, "noise": {"eta": 0.7}})
    assert [(credit.index, credit.advantage) for credit in credits_of(spec, rows)[0]] == [(1, 1.0), (2, -1.0)]


def chosen(advantages: list[float], best_of: int | None, group: int = 0) -> list[int]:
    credits = [Credit(group, index, 0.0, 0.0) for index in range(len(advantages))]
    return [one.index for one in credit.best_and_worst(credits, advantages, best_of)]


def test_best_of_keeps_the_best_and_the_worst_half() -> None:
    """DanceGRPO's rule: argsort, its last `-n // 2` and its first `n // 2`."""
    rng = np.random.default_rng(3)
    for size, best_of in [(16, 8), (16, 7), (5, 4), (12, 2)]:
        advantages = rng.normal(size=size)
        order = np.argsort(advantages)
        theirs = {*order[-best_of // 2 :].tolist(), *order[: best_of // 2].tolist()}
        assert len(theirs) == best_of
        assert chosen(advantages.tolist(), best_of) == sorted(theirs)


def test_best_of_leaves_small_groups_whole() -> None:
    assert chosen([0.3, -0.1, 0.2], 4) == chosen([0.3, -0.1, 0.2], None) == chosen([0.3, -0.1, 0.2], 3) == [0, 1, 2]
    assert chosen([0.0] * 6, 4) == [0, 1, 4, 5]


@pytest.mark.parametrize("clamp", [0.1, None])
def test_best_of_ranks_by_the_total_whatever_is_clamped(clamp: float | None) -> None:
    rewards = [0.0, 10.0, 3.0, 9.0, 1.0, 2.0]
    rows = scored(*((0, index, reward) for index, reward in enumerate(rewards)))
    algorithm = {"best_of": 4, "advantage_clamp": clamp}
    credits = credits_of(spec_of(algorithm, {"ocr": {}}, rollout={"group_size": 6}), rows)[0]
    assert [one.index for one in credits] == [0, 1, 3, 4]


def test_best_of_takes_the_advantages_of_whole_groups() -> None:
    rewards = np.random.default_rng(5).normal(size=(2, 6))
    rows = scored(*((group, index, float(rewards[group, index])) for group in range(2) for index in range(6)))[:-3]
    whole, of_all = credits_of(spec_of({}, {"ocr": {}}, rollout={"group_size": 6}), rows)
    part, of_part = credits_of(spec_of({"best_of": 4}, {"ocr": {}}, rollout={"group_size": 6}), rows)
    ranks = np.argsort(np.argsort(rewards[0]))
    left_out = {(0, index) for index in range(6) if ranks[index] in (2, 3)}
    assert part == [one for one in whole if (one.group, one.index) not in left_out]
    assert len(part) == 4 + 3  # three of the second group have a score
    assert of_part == of_all


def test_pairs_stand_together_the_winner_first() -> None:
    rows = [(0, 0, 0.2), (0, 1, 0.9), (0, 2, 0.1), (0, 3, 0.5), (2, 0, 0.3), (2, 5, 0.3)]
    credits, stats = credits_of(
        spec_of({"name": "online_dpo", "pairs_per_group": 2}, {"ocr": {}}, rollout={"group_size": 4}), scored(*rows)
    )
    assert credits == [
        Credit(0, 1, 0.9, 1.0, 0), Credit(0, 2, 0.1, -1.0, 0), Credit(0, 3, 0.5, 1.0, 1), Credit(0, 0, 0.2, -1.0, 1),
    ]  # fmt: skip
    assert (stats.advantage_mean, stats.advantage_max, stats.advantage_min) == (0.0, 1.0, -1.0)
    assert stats.zero_std_ratio == 0.5


def test_where_no_pair_differs_nothing_is_trained_on() -> None:
    credits, stats = credits_of(spec_of({"name": "online_dpo"}, {"ocr": {}}), scored((0, 0, 1.0), (0, 1, 1.0)))
    assert credits == []
    assert (stats.reward_mean, stats.advantage_max, stats.advantage_min) == (1.0, 0.0, 0.0)


def test_of_preferences_the_chosen_wins_and_rewards_play_no_part() -> None:
    spec = spec_of({"name": "dpo"}, {"ocr": {"weight": -1.0}, "preference": {"weight": -2.0}})
    rows = scored((0, 0, 1.0), (0, 1, 0.0), (1, 1, 0.0), names=("preference",))  # of group 1 the chosen was lost
    credits, stats = credits_of(spec, rows)
    assert credits == [Credit(0, 0, 1.0, 1.0), Credit(0, 1, 0.0, -1.0)]
    assert stats.reward_max == 1.0


def test_an_old_ledger_knows_sums_alone() -> None:
    rewards = {"a": {"weight": 3.0}, "b": {"weight": 0.5}}
    old = [Scored(*row) for row in TWO_GROUPS]
    mixed = [Scored(*TWO_GROUPS[0], {"a": 7.0, "b": 7.0}), *old[1:]]
    expected, _ = credits_of(spec_of({}, {"ocr": {}}), scored(*TWO_GROUPS))
    assert credits_of(spec_of({}, rewards), old)[0] == credits_of(spec_of({}, rewards), mixed)[0] == expected


@pytest.mark.parametrize("kl", [float("inf"), float("nan"), 1e300])
def test_a_kl_that_no_variance_can_be_made_of_drops_its_sample(kl: float) -> None:
    sample = common_pb2.Sample(id=common_pb2.SampleId(step=3, group=1, index=2), reference_kl=kl)
    fact = requests.scored_or_dropped(spec_of({}, {"ocr": {}}), sample, SampleScore(1.0))
    assert isinstance(fact, ev.Dropped)
    assert (fact.step, fact.group, fact.index, fact.reason) == (3, 1, 2, "non_finite_reference_kl")
    sample.reference_kl = 0.5
    fact = requests.scored_or_dropped(spec_of({}, {"ocr": {}}), sample, SampleScore(1.0))
    assert isinstance(fact, ev.Scored)
    assert fact.reference_kl == 0.5


def test_the_largest_score_that_is_taken_gives_finite_advantages() -> None:
    rows = [(0, 0, MAX_SCORE), (0, 1, -MAX_SCORE), (1, 0, MAX_SCORE), (1, 1, 1.0)]
    credits, _ = credits_of(spec_of({}, {"ocr": {}}), scored(*rows))
    assert all(math.isfinite(credit.advantage) for credit in credits)


def test_diversity_multiplies_the_advantages_above_zero() -> None:
    """GARDO's: over the mean of the group; a sample without such a score keeps its advantage."""
    rewards = {"ocr": {}, "far": {"weight": 0.0}}
    algorithm = {"advantage_std": "none", "advantage_clamp": 4.0}
    far = [(0, 0, 4.0, 0.1), (0, 1, 0.0, 0.9), (0, 2, 2.0, 0.2), (0, 3, 6.0, None), (1, 0, 9.0, 0.6), (1, 1, 1.0, 0.2)]
    rows = [
        Scored(group, index, score, {"ocr": score} | ({} if value is None else {"far": value}))
        for group, index, score, value in far
    ]
    plain, _ = credits_of(spec_of(algorithm, rewards), rows)
    shaped, stats = credits_of(spec_of(algorithm | {"diversity": "far"}, rewards), rows)
    assert [one.advantage for one in plain] == [1.0, -3.0, -1.0, 3.0, 4.0, -4.0]
    assert [one.advantage for one in shaped] == pytest.approx([1.0 * 0.1 / 0.4, -3.0, -1.0, 3.0, 4.0, -4.0])
    assert stats.advantage_mean == pytest.approx(np.mean([one.advantage for one in shaped]))


def test_the_kl_counts_for_doubted_samples_alone() -> None:
    """Best by the total and worst by the other reward; without a gate it counts for all."""
    rows = [Scored(0, index, float(index), {"ocr": float(index), "taste": float(-index)}) for index in range(5)]
    rewards = {"ocr": {}, "taste": {"weight": 0.0}}
    gated, _ = credits_of(spec_of({"kl_coef": 0.1, "kl_gate": {"rewards": ["taste"]}}, rewards), rows)
    assert [one.without_kl for one in gated] == [True, True, True, True, False]  # the most doubted tenth
    plain, _ = credits_of(spec_of({"kl_coef": 0.1}, rewards), rows)
    assert not any(one.without_kl for one in plain)


def test_each_sample_has_the_teacher_of_its_source() -> None:
    """The deal of sources to groups decides, over many steps. There is no reward and no advantage."""
    sources = [{"name": "signs", "path": "a.txt", "weight": 3.0}, {"name": "scenes", "path": "b.txt"}]
    teachers = {name: {"adapter": f"/{name}", "sources": [name]} for name in ("scenes", "signs")}
    spec = parse_job(
        {
            "model": {"path": "m"},
            "algorithm": {"name": "diffusion_opd", "teachers": teachers},
            "data": {"sources": sources},
            "rollout": {"prompts_per_step": 8, "group_size": 1},
        }
    )
    seen: dict[str, int] = {"signs": 0, "scenes": 0}
    for step in range(8):
        credits, _ = credits_of(spec, [Scored(group, 0, 0.0) for group in range(8)], step)
        dealt = Mixture(spec.data.each, spec.seed, 8).of_step(step).tolist()
        assert [one.teacher for one in credits] == [sources[number]["name"] for number in dealt]
        assert [one.advantage for one in credits] == [0.0] * 8
        for one in credits:
            seen[one.teacher] += 1
    assert seen == {"signs": 48, "scenes": 16}


def test_a_reward_that_watches_gives_no_advantage_next_to_a_teacher() -> None:
    algorithm = {"name": "diffusion_opd", "teachers": {"one": {"adapter": "job:ID"}}}
    credits, stats = credits_of(spec_of(algorithm, {"ocr": {}}), scored(*TWO_GROUPS))
    assert {(one.advantage, one.teacher) for one in credits} == {(0.0, "one")}
    assert [one.reward for one in credits] == [1.0, 3.0, 5.0, 5.0]
    assert stats.reward_mean == 3.5
