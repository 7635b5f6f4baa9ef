"""Samples of several sources in one step: a reward that does not score a source is absent there, not 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flowfleet.job.spec import JobSpec, parse_job
from services.controller.job.credit import credits_of
from services.controller.job.machine.batch import Scored
from services.controller.prompts.mixture import Mixture
from services.controller.rewards.composition import compose
from services.controller.rewards.rows import source_rows

EPS = 1e-4
COUNT, SIZE = 8, 4
REWARDS: dict[str, Any] = {"ocr": {"weight": 2.0}, "aesthetic": {"weight": 0.5}}


def spec_of(sources: list[dict[str, Any]] | None, rewards: dict[str, Any] | None = None, **algorithm: Any) -> JobSpec:
    data = {"train": "t.txt"} if sources is None else {"sources": sources}
    return parse_job(
        {
            "model": {"path": "m"},
            "rewards": REWARDS if rewards is None else rewards,
            "data": data,
            "rollout": {"prompts_per_step": COUNT, "group_size": SIZE},
            "algorithm": {"advantage_clamp": None, **algorithm},
        }
    )


SIGNS: dict[str, Any] = {"name": "signs", "path": "a.txt", "rewards": {"ocr": 1.0}}
SCENES: dict[str, Any] = {"name": "scenes", "path": "b.txt", "rewards": {"aesthetic": 3.0}}
BOTH: dict[str, Any] = {"name": "both", "path": "c.txt"}


def names_of(spec: JobSpec, step: int = 0) -> list[str]:
    mixture = Mixture(spec.data.each, spec.seed, COUNT)
    return [spec.data.each[k].name for k in mixture.of_step(step).tolist()]


def drawn(spec: JobSpec, seed: int, offset: float = 0.0) -> list[Scored]:
    """Samples with raw scores of the rewards that their source has; `offset` is added to all of `aesthetic`."""
    random = np.random.default_rng(seed)
    rows = []
    for group, name in enumerate(names_of(spec)):
        rewards = spec.data.scoring(name, spec.rewards)
        for index in range(SIZE):
            raw = {"ocr": float(random.random()), "aesthetic": 20 + 5 * float(random.random()) + offset}
            scores = {reward: raw[reward] for reward in rewards}
            rows.append(Scored(group, index, compose(rewards, 0, scores).total or 0.0, scores))
    return rows


def advantages(spec: JobSpec, rows: list[Scored]) -> list[float]:
    return [credit.advantage for credit in credits_of(spec, spec.rewards, 0, rows)[0]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def weight(spec: JobSpec, group: int, reward: str) -> float:
    """Written out: the reward's weight times the source's factor; 0 where it does not score the source."""
    source = next((one for one in spec.data.sources if one.name == names_of(spec)[group]), None)
    factor = 1.0 if source is None or source.rewards is None else source.rewards.get(reward, 0.0)
    return float(REWARDS[reward]["weight"]) * factor


def groups_of(rows: list[Scored]) -> dict[int, list[Scored]]:
    return {group: [row for row in rows if row.group == group] for group in range(COUNT)}


@pytest.mark.parametrize("seed", range(4))
def test_the_std_of_the_batch_is_that_of_totals_without_what_a_source_has_not(seed: int) -> None:
    """Oracle: in the batch, where a reward is absent its mean part stands in for it."""
    spec = spec_of([SIGNS, SCENES, BOTH])
    rows = drawn(spec, seed)
    totals = []
    for row in rows:
        total = 0.0
        for reward in REWARDS:
            parts = [weight(spec, one.group, reward) * one.scores[reward] for one in rows if reward in one.scores]
            own = row.scores.get(reward)
            total += mean(parts) if own is None else weight(spec, row.group, reward) * own
        totals.append(total)
    scale = std(totals) + EPS
    centers = {group: mean([row.score for row in own]) for group, own in groups_of(rows).items()}
    expected = [(row.score - centers[row.group]) / scale for row in rows]  # row.score has what its source has alone
    np.testing.assert_allclose(advantages(spec, rows), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("combination", ["sum", "normalized", "separate"])
def test_the_level_of_a_reward_that_others_have_not_moves_no_advantage(combination: str) -> None:
    """Counting an absent reward as 0 would: the batch would spread by the level itself."""
    spec = spec_of([SIGNS, SCENES], reward_combination=combination)
    np.testing.assert_allclose(
        advantages(spec, drawn(spec, 1)), advantages(spec, drawn(spec, 1, offset=1000.0)), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalizes_each_reward_over_the_groups_that_have_it(seed: int) -> None:
    spec = spec_of([SIGNS, SCENES, BOTH], reward_combination="normalized")
    rows = drawn(spec, seed)
    parts = []
    for row in rows:
        part = 0.0
        for reward, own in row.scores.items():
            values = [one.scores[reward] for one in groups_of(rows)[row.group]]
            part += weight(spec, row.group, reward) * (own - mean(values)) / (std(values) + EPS)
        parts.append(part)
    expected = [part / (std(parts) + EPS) for part in parts]
    np.testing.assert_allclose(advantages(spec, rows), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_separate_rewards_divide_by_the_std_of_those_who_have_it(seed: int) -> None:
    spec = spec_of([SIGNS, SCENES, BOTH], reward_combination="separate", advantage_std="global")
    rows = drawn(spec, seed)
    expected = []
    for row in rows:
        part = 0.0
        for reward, own in row.scores.items():
            values = [one.scores[reward] for one in groups_of(rows)[row.group]]
            scale = std([one.scores[reward] for one in rows if reward in one.scores]) + EPS
            part += weight(spec, row.group, reward) * (own - mean(values)) / scale
        expected.append(part)
    np.testing.assert_allclose(advantages(spec, rows), expected, rtol=1e-9, atol=1e-12)


def test_sources_with_all_rewards_count_as_one_file_does() -> None:
    spec, short = spec_of([BOTH, {**BOTH, "name": "more"}]), spec_of(None)
    rows = drawn(short, 5)
    assert advantages(spec, rows) == advantages(short, rows)


def test_a_gate_zeroes_a_sample_among_those_of_its_source_alone() -> None:
    """A sample that a gate zeroes has no score of a reward that its source has not."""
    rewards = {"ocr": {"weight": 2.0, "gate": {"below": 0.1}}, "aesthetic": {"weight": 0.5}}
    spec = spec_of([SIGNS, SCENES], rewards, reward_combination="sum")
    rows = drawn(spec, 2)
    group = names_of(spec).index("signs")
    place = next(k for k, row in enumerate(rows) if row.group == group)
    zeroed = [*rows]
    zeroed[place] = Scored(group, 0, 0.0, {"ocr": 0.05})
    plain = [*rows]
    plain[place] = Scored(group, 0, 0.0, {"ocr": 0.0})
    ungated = spec_of([SIGNS, SCENES], reward_combination="sum")
    np.testing.assert_allclose(advantages(spec, zeroed), advantages(ungated, plain), rtol=1e-9)


def test_a_row_tells_each_source_and_what_it_misses() -> None:
    spec = spec_of([SIGNS, SCENES])
    row = source_rows(
        "critic",
        spec.data,
        spec.rewards,
        [{"ocr": 0.25}, {"ocr": 0.75}, {}, {"aesthetic": 4.0}],
        [0.5, 1.5, None, 6.0],
        ["signs", "signs", "signs", "scenes"],
    )
    assert (row["critic/rewards/ocr/mean"], row["critic/rewards/ocr/missing"]) == (0.5, 1.0)
    assert (row["critic/rewards/aesthetic/mean"], row["critic/rewards/aesthetic/missing"]) == (4.0, 0.0)
    assert (row["critic/sources/signs/reward_mean"], row["critic/sources/signs/num_samples"]) == (1.0, 3.0)
    assert row["critic/sources/signs/rewards/ocr/missing"] == 1.0
    assert row["critic/sources/scenes/rewards/aesthetic/mean"] == 4.0
    assert "critic/sources/scenes/rewards/ocr/mean" not in row
    assert not any("sources" in name for name in source_rows("val-core", spec_of(None).data, spec.rewards, [], [], []))
