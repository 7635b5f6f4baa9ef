"""A plugin's loss with settings of its own: validated, described, stored, and handed to the function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import Field

from flowfleet.algorithms.losses import Limits, LossOutput, PolicyRows, flow_grpo, limits
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm, Loss, register_algorithm, register_loss
from flowfleet.algorithms.settings import PolicySettings
from flowfleet.cli.submission import explain
from flowfleet.job.reference import find, settings
from flowfleet.job.spec import JobSpec, parse_job


class MySettings(PolicySettings):
    """Settings of this loss."""

    delta: float = Field(default=0.01, gt=0.0, le=0.5)
    """How much of it counts."""


def my_loss(rows: PolicyRows, limits: Limits) -> LossOutput:
    output = flow_grpo(rows, limits)
    return LossOutput(limits.settings.of(MySettings).delta * output.loss, output.stats)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    register_loss(Loss("my_loss", f"{__name__}:my_loss", "policy", settings=MySettings))
    register_algorithm(Algorithm("my_loss", "Mine", "", "", loss="my_loss", defaults={"rollout.noise.eta": 0.5}))
    yield
    del ALGORITHMS["my_loss"], LOSSES["my_loss"]


def job(**algorithm: Any) -> JobSpec:
    base = {"model": {"path": "m"}, "data": {"train": "d.txt"}, "rewards": {"ocr": {}}}
    return parse_job({**base, "algorithm": {"name": "my_loss", **algorithm}})


def test_it_is_validated_and_stored_with_the_others() -> None:
    spec = job(delta=0.03, kl_coef=0.1)
    assert spec.algorithm.of(MySettings).delta == 0.03
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert job().algorithm.of(MySettings).delta == 0.01


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"delta": 0.7}, r"algorithm\.delta: input should be less than or equal to 0\.5"),
        ({"detla": 0.1}, r"algorithm\.detla: unknown setting; did you mean algorithm\.delta\?"),
        ({"clip_range": 0.1}, r"algorithm\.clip_range has no effect with algorithm\.loss = my_loss"),
        ({"name": "flow_grpo", "delta": 0.1}, r"algorithm\.loss = flow_grpo: leave it out, or use my_loss"),
    ],
)
def test_what_is_wrong_names_its_keys(part: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        job(**part)


def test_it_is_described() -> None:
    (row,) = find("algorithm.delta", list(settings(JobSpec)))
    assert (row.values, row.default, row.losses) == ("number, > 0, ≤ 0.5", "0.01", ("my_loss",))
    assert "algorithm.delta" in [one.name for one in find("my_loss", [])]
    tables = JobSpec.model_json_schema()["properties"]["algorithm"]["anyOf"]
    (own,) = [table for table in tables if table["properties"]["loss"]["const"] == "my_loss"]
    assert own["properties"]["delta"]["exclusiveMinimum"] == 0
    assert own["properties"]["delta"]["description"] == "How much of it counts."


def test_a_dry_run_shows_it() -> None:
    assert explain(job(delta=0.03)).job["algorithm"]["delta"] == 0.03


def test_it_reaches_the_function() -> None:
    zeros = torch.zeros(2)
    rows = PolicyRows(zeros, zeros, torch.tensor([1.0, -1.0]))
    output = LOSSES["my_loss"].load()(rows, limits(job(delta=0.25).algorithm, 64))
    assert output.loss.tolist() == [-0.25, 0.25]
