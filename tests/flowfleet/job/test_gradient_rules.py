"""What goes with losses that train on the gradients of rewards."""

from __future__ import annotations

from typing import Any

import pytest

from flowfleet.algorithms.windows import trained_steps
from flowfleet.job.spec import JobSpec, parse_job


def spec_of(named: str, **parts: Any) -> JobSpec:
    job: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "prompts.txt"},
        "rewards": {"judge": {}, "ocr": {"weight": 0.0}},
        "algorithm": {"name": named},
    }
    for name, part in parts.items():
        job[name] = {**job.get(name, {}), **part}
    return parse_job(job)


@pytest.mark.parametrize(
    ("algorithm", "parts", "words"),
    [
        ("srpo", {"rewards": {"judge": {"gate": {"below": 0.2}}}}, "rewards.judge.gate has no gradient"),
        ("srpo", {"rewards": {"judge": {"clip": [0.0, 1.0]}}}, "rewards.judge.clip cuts scores, not the gradient"),
        ("refl", {"rewards": {"judge": {"on_failure": "drop"}}}, 'set it to "pause"'),
        ("refl", {"trainer": {"updates_per_step": 2}}, "takes one update a step"),
        ("refl", {"trainer": {"passes": 2}}, "takes one update a step"),
        ("srpo", {"rollout": {"num_frames": 5}}, "trains on pictures; set it to 1"),
        ("refl", {"rollout": {"noise": {"eta": 0.5}}}, "continues from the steps of an ODE; set it to 0"),
        ("refl", {"rollout": {"window": {"strategy": "fraction"}}}, 'use "random"'),
        ("srpo", {"algorithm": {"name": "srpo", "advantage_std": "group"}}, "with algorithm.loss = srpo"),
        ("srpo", {"algorithm": {"name": "srpo", "best_of": 4}}, "with algorithm.loss = srpo"),
        ("srpo", {"algorithm": {"name": "srpo", "negative_words": ["Oily"]}}, "give positive words too"),
        ("srpo", {"algorithm": {"name": "srpo", "relative_weight": 1.0}}, "without algorithm.negative_words"),
        ("refl", {"algorithm": {"name": "refl", "align_step": 0.1}}, "has no effect with algorithm.loss = refl"),
        ("flow_grpo", {"algorithm": {"name": "flow_grpo", "reward_ceiling": 1.0}}, "leave it out, or use refl"),
        ("refl", {"algorithm": {"name": "refl", "correction": {"mode": "band"}}}, "with algorithm.loss = refl"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(algorithm: str, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        spec_of(algorithm, **parts)
    assert words in str(caught.value)


def test_guards_that_only_watch_may_do_what_they_like() -> None:
    spec = spec_of("srpo", rewards={"judge": {}, "ocr": {"weight": 0.0, "gate": {"below": 0.1}}})
    assert spec.trains_on_gradients


def test_groups_of_one_are_enough() -> None:
    assert spec_of("srpo", rollout={"group_size": 1}).samples_per_step == 32


@pytest.mark.parametrize(
    ("window", "num_steps", "reachable"),
    [
        ({}, 40, tuple(range(30, 40))),  # as the authors of ReFL have it
        ({}, 6, (5,)),
        ({"low": 3}, 6, (3, 4, 5)),
        ({"low": 2, "high": 5}, 6, (2, 3, 4)),
        ({"strategy": "listed", "steps": [4]}, 6, (4,)),
    ],
)
def test_refl_begins_in_the_last_quarter_or_where_the_job_says(
    window: dict[str, Any], num_steps: int, reachable: tuple[int, ...]
) -> None:
    spec = spec_of("refl", rollout={"num_inference_steps": num_steps, "window": window})
    assert spec.window.reachable == reachable
    drawn = {trained_steps(spec, step) for step in range(200)}
    assert drawn == {(step,) for step in reachable}
    assert spec.records_steps
    assert not spec_of("srpo").records_steps
