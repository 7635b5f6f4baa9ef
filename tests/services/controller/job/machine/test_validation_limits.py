"""How far rewards have parted or fallen, by hand-worked numbers, and which validations pause a job."""

from __future__ import annotations

import numpy as np
import pytest

from flowfleet.job.spec import RewardPart
from services.controller.job.machine import events as ev
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from services.controller.job.machine.validation_limits import (
    NUM_SCORED,
    REWARD_STD,
    complete,
    largest_disagreement,
    reward_drop,
    watched,
)
from services.controller.store.records import Validation
from tests.services.controller.job.machine.test_state_machine import make_spec


def validation(version: int, total: float | None, mean: float | None, std: float = 0.4) -> Validation:
    values: dict[str, float | None] = (
        {} if mean is None else {"val-core/rewards/judge/mean": mean, "val-core/rewards/judge/std": std}
    )
    return Validation(version=version, reward=total, values=values)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0.5, 0.5)], 0.0),
        ([(0.5, 0.5), (0.6, 0.6)], 0.0),  # both rise
        ([(0.5, 0.5), (0.6, 0.6), (0.7, 0.4)], (0.6 - 0.4) / 0.4),  # since the best, not since the first
        ([(0.5, 0.5), (0.6, 0.6), (0.6, 0.4)], (0.6 - 0.4) / 0.4),  # the total stands still
        ([(0.5, 0.5), (0.6, 0.6), (0.55, 0.4)], 0.0),  # both fall
        ([(0.5, 0.5), (None, 0.4), (0.6, 0.3)], (0.5 - 0.3) / 0.4),  # one that no reward scored
    ],
)
def test_what_is_watched_falls_while_the_total_does_not(
    rows: list[tuple[float | None, float]], expected: float
) -> None:
    found = largest_disagreement([validation(version, *row) for version, row in enumerate(rows)], ["judge"])
    assert found == ("judge", pytest.approx(expected))


def test_a_mean_is_compared_with_the_widest_spread_that_was_seen() -> None:
    rows = [validation(0, 0.5, 0.6, std=0.2), validation(1, 0.6, 0.5, std=0.1)]
    assert largest_disagreement(rows, ["judge"]) == ("judge", pytest.approx(0.5))
    same = [validation(0, 0.5, 0.6, std=0.0), validation(1, 0.6, 0.5, std=0.0)]
    assert largest_disagreement(same, ["judge"]) == ("judge", 0.0)


def test_without_a_score_nothing_is_compared() -> None:
    assert largest_disagreement([validation(0, 0.5, 0.6)], []) is None
    assert largest_disagreement([validation(0, 0.5, 0.6), validation(1, 0.6, None)], ["judge"]) is None
    assert largest_disagreement([validation(0, 0.5, 0.6), validation(1, None, 0.1)], ["judge"]) is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([(0.7, 0.4)], (0, 0.0)),
        ([(0.5, 0.4), (0.7, 0.4)], (1, 0.0)),
        ([(0.5, 0.4), (0.7, 0.2), (0.4, 0.1)], (1, (0.7 - 0.4) / 0.4)),  # since the best, by the widest spread
        ([(0.7, 0.4), (None, None), (0.5, 0.4)], (0, (0.7 - 0.5) / 0.4)),  # one that no reward scored
        ([(0.7, 0.4), (None, None)], None),
        ([(0.7, 0.0), (0.5, 0.0)], (0, 0.0)),
        ([(0.7, None), (0.5, 0.4)], (0, (0.7 - 0.5) / 0.4)),  # a validation older than its standard deviation
    ],
)
def test_the_reward_falls_from_its_best(
    rows: list[tuple[float | None, float | None]], expected: tuple[int, float] | None
) -> None:
    validations = [
        Validation(version=at, reward=reward, values={REWARD_STD: std}) for at, (reward, std) in enumerate(rows)
    ]
    assert reward_drop(validations) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("num_prompts", "least", "most"), [(100, 0.0, 0.02), (32, 0.2, 0.35)])
def test_noise_alone_is_above_one_half_as_rarely_as_the_setting_says(
    num_prompts: int, least: float, most: float
) -> None:
    """The total rises, what is watched has the same distribution in each of ten validations; to its disadvantage a
    prompt's scores at two versions are independent."""
    scores = np.random.default_rng(0).standard_normal((400, 10, num_prompts))
    alarms = 0
    for means, stds in zip(scores.mean(2), scores.std(2), strict=True):
        rows = [validation(version, version, *row) for version, row in enumerate(zip(means, stds, strict=True))]
        far = [largest_disagreement(rows[:count], ["judge"]) for count in range(1, len(rows) + 1)]
        alarms += any(found is not None and found[1] > 0.5 for found in far)
        alone = [
            Validation(version=one.version, reward=mean, values={REWARD_STD: std})
            for one, mean, std in zip(rows, means, stds, strict=True)
        ]
        falls = [reward_drop(alone[:count]) for count in range(1, len(rows) + 1)]
        assert [one[1] for one in falls if one] == pytest.approx([found[1] for found in far if found is not None])
    assert least <= alarms / len(scores) <= most


@pytest.mark.parametrize(
    ("numbers", "stay"),
    [
        ([], []),
        ([0.0], [0]),
        ([10.0, 5.0, 4.0], [0, 1]),  # half is enough
        ([4.0, 10.0], [1]),  # an earlier one too
        ([10.0, None, 0.0], [0, 1]),  # kept before validations said it
    ],
)
def test_a_validation_with_few_scores_says_nothing(numbers: list[float | None], stay: list[int]) -> None:
    validations = [Validation(version=at, reward=0.5, values={NUM_SCORED: number}) for at, number in enumerate(numbers)]
    assert [one.version for one in complete(validations)] == stay


def test_what_counts_at_some_step_is_not_watched() -> None:
    rewards = {
        "ocr": RewardPart(),
        "people": RewardPart(weight=0.0),
        "late": RewardPart(curve=((0, 0.0), (10, 1.0))),
        "silent": RewardPart(curve=((0, 0.0),)),
    }
    assert watched(rewards) == ["people", "silent"]


@pytest.mark.parametrize(
    ("limit", "found", "pauses"), [(0.5, 0.6, True), (0.5, 0.5, False), (0.5, None, False), (None, 9.0, False)]
)
@pytest.mark.parametrize(
    ("setting", "measure", "said"),
    [
        ("max_disagreement", "disagreement", "since its best validation rewards.judge has lost 0.60"),
        ("max_reward_drop", "reward_drop", "since version 0 the held-out reward has lost 0.60"),
    ],
)
def test_a_job_pauses_above_its_limit(
    setting: str, measure: str, said: str, limit: float | None, found: float | None, pauses: bool
) -> None:
    machine = ready(setting, limit)
    event = ev.Validated.model_validate({"version": 1, "reward": 0.9, "parted": "judge", measure: found})
    machine.apply(event)
    assert (machine.state.status is Status.PAUSED) is pauses
    assert machine.state.validated == 1
    if not pauses:
        return
    assert f"version 1: {said}" in machine.state.reason
    assert f"schedule.{setting} = 0.5" in machine.state.reason
    machine.apply(ev.ResumeRequested())
    machine.apply(event)  # again, after a crash
    assert machine.state.status is Status.RUNNING


def test_the_last_validation_pauses_no_job() -> None:
    machine = ready("max_disagreement", 0.5)
    last = ev.Validated(version=machine.steps, reward=0.9, disagreement=9.0, parted="judge")
    assert not machine.pause_reason(last)


def ready(setting: str, limit: float | None) -> Machine:
    schedule = {"steps": 3, "validate_every": 1, setting: limit}
    rewards = {"ocr": {}, "judge": {"weight": 0.0}}
    machine = Machine(make_spec(schedule=schedule, rewards=rewards))
    machine.apply(ev.TrainerReady(version=0))
    machine.apply(ev.Published(version=0))
    machine.apply(ev.Validated(version=0, reward=0.5))
    return machine
