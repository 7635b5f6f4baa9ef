"""Picks from the newest step first, one sample for each prompt before another of the same; ranks by reward."""

from __future__ import annotations

import random

import pytest

from flowfleet.api.samples import Sample
from flowfleet.cli.samples.page import picks


def sample(step: int, prompt: str, index: int, reward: float | None) -> Sample:
    return Sample(step=step, group=0, index=index, prompt=prompt, reward=reward)


SAMPLES = [sample(step, prompt, index, step + index / 10) for step in range(3) for prompt in "ab" for index in range(2)]


def places(found: list[Sample]) -> list[tuple[int, str, int]]:
    return [(one.step, one.prompt, one.index) for one in found]


def test_the_worst_are_not_those_of_the_first_step() -> None:
    assert places(picks(SAMPLES, 2, best=False)) == [(2, "a", 0), (2, "b", 0)]


def test_the_best_of_an_easy_prompt_comes_once() -> None:
    easy = [sample(5, "easy", index, 9.0) for index in range(20)]
    assert places(picks([*SAMPLES, *easy], 3, best=True)) == [(5, "easy", 0), (2, "a", 1), (2, "b", 1)]


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("num", [1, 5, 20, 99])
def test_ranks_are_in_the_order_of_rewards(best: bool, num: int) -> None:
    chance = random.Random(num)
    many = [sample(at % 7, chance.choice("abc"), at, chance.uniform(-2, 2)) for at in range(60)]
    rewards = [one.reward or 0.0 for one in picks(many, num, best=best)]
    assert rewards == sorted(rewards, reverse=best)


def test_what_is_missing_is_filled_up_in_rounds() -> None:
    found = places(picks(SAMPLES, 4, best=True))
    assert found == [(2, "a", 1), (2, "b", 1), (2, "a", 0), (2, "b", 0)]
    assert len(picks(SAMPLES, 99, best=True)) == len(SAMPLES)


def test_samples_without_a_reward_are_left_out() -> None:
    assert picks([sample(0, "a", 0, None)], 5, best=False) == []
