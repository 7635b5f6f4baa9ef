"""A trained adapter next to its base, by the command that users type: the same seeds, and the difference that training
made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfleet.api.samples import Sample
from flowfleet.cli import main as cli
from tests.e2e.conftest import Fleet

pytestmark = pytest.mark.long

LEARNT = 0.02
"""Least gain after a few steps at a high learning rate."""


def test_a_trained_adapter_is_evaluated_beside_its_base(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fleet.client
    monkeypatch.setenv("FLOWFLEET_URL", client.url)
    trained = client.wait(client.submit(small_job(**{"rollout.prompts_per_step": 8, "schedule.keep_last": 9})).id, 240)
    assert trained.status == "succeeded", trained.reason
    words = ["eval", "--from", trained.id, "--adapter", f"job:{trained.id}@2", "--adapter", f"job:{trained.id}"]
    words += ["--set", "schedule.validation_samples=2", "--set", "name=side", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.stderr
    base, half, whole = json.loads(done.stdout)
    assert [base["model"], half["model"], whole["model"]] == ["base", f"job:{trained.id}@2", f"job:{trained.id}"]
    assert [row["samples"] for row in (base, half, whole)] == [32, 32, 32]
    seeds = [{place(one): one.seed for one in held_out(fleet, row["job"])} for row in (base, half, whole)]
    assert len(seeds[0]) == 32
    assert seeds[0] == seeds[1] == seeds[2]

    # What the job's own validations gave: one sample a prompt, which is the first of two here.
    for row, version in ((base, 0), (half, 2), (whole, 4)):
        own = {place(one): one.reward for one in held_out(fleet, trained.id, version)}
        again = {place(one): one.reward for one in held_out(fleet, row["job"]) if one.index == 0}
        assert again == own
    change = whole["scores"]["reward"]["change"]
    assert change["samples"] == 32
    assert change["mean"] == pytest.approx(mean(whole) - mean(base))
    assert change["mean"] > LEARNT
    assert base["scores"]["reward"]["change"]["mean"] == 0.0

    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<article") == 3 * 32
    assert page.count("data:image/png;base64,") == 3 * 32

    narrow = small_job(**{"name": "narrow", "trainer.lora.rank": 4, "schedule.steps": 0})
    narrow["model"]["adapter"] = f"job:{trained.id}"
    refused = client.wait(client.submit(narrow).id, 240)
    assert refused.status == "failed"
    assert "has rank 32, and trainer.lora.rank is 4" in refused.reason


def mean(row: dict[str, Any]) -> float:
    return float(row["scores"]["reward"]["score"]["mean"])


def held_out(fleet: Fleet, job_id: str, version: int = 0) -> list[Sample]:
    return list(fleet.client.samples(job_id, purpose="validate", step=version))


def place(sample: Sample) -> tuple[int, int]:
    return sample.group, sample.index
