"""The loop end to end: REST in, a better model out, every part a process of its own."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from flowfleet.api.jobs import Job, MetricsRow
from flowfleet.api.problems import ApiError
from flowfleet.cli.main import app
from tests.e2e.conftest import DEADLINE_S, Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
PROFILED = [(0, "rollout"), (0, "trainer")]
CURVE = ("critic/rewards/mean", "actor/loss", "actor/grad_norm")


def curve(rows: list[MetricsRow]) -> list[tuple[float | None, ...]]:
    return [tuple(row.values[name] for name in CURVE) for row in rows]


@pytest.fixture(scope="module")
def first(fleet: Fleet, small_job: MakeJob) -> Job:
    """The fleet's first job, on a replica that holds the base. Its first step is profiled."""
    job = fleet.client.submit(small_job())
    command = ["profile", job.id, "--url", fleet.stack.url, "--json"]
    told = CliRunner().invoke(app, command, env={"FLOWFLEET_API_KEY": fleet.stack.api_key})
    assert [(profile["step"], profile["of"]) for profile in json.loads(told.output)] == PROFILED
    return fleet.client.wait(job.id, DEADLINE_S)


def test_a_job_runs_to_its_end_and_leaves_what_it_promised(fleet: Fleet, first: Job) -> None:
    assert_accounted(first, 4 * 24)
    rows = fleet.metrics(first)
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert all(row.values["critic/rewards/group_size"] == 6 for row in rows)
    assert all(row.values["training/off_policy/trajectory_staleness/mean"] == 0 for row in rows)
    for row in rows:  # promise 7 of docs/architecture.md: log-probs are recomputed exactly
        assert row.values["rollout_corr/ratio_min"] == row.values["rollout_corr/ratio_max"] == 1.0
    validations = [event.data for event in fleet.client.events(first.id) if event.type == "validation"]
    assert [data["version"] for data in validations] == [0, 2, 4]
    assert all(0 <= data["val/reward"] <= 1 and data["val/num_scored"] == 16 for data in validations)
    assert {point.step for point in fleet.client.checkpoints(first.id)} == {2, 4}
    assert (Path(first.results["model"]) / "pytorch_lora_weights.safetensors").is_file()
    samples = list(fleet.client.samples(first.id, step=3))
    assert len(samples) == 24
    assert fleet.client.media(first.id, samples[0]).startswith(b"\x89PNG")


def test_every_sample_of_a_step_has_its_trace(fleet: Fleet, first: Job) -> None:
    url = f"{fleet.stack.url}/v1/jobs/{first.id}/samples"
    (row,) = [row for row in fleet.metrics(first) if row.step == 2]
    ratios, advantages = [], []
    for sample in fleet.client.samples(first.id, step=2):
        trace = httpx.get(f"{url}/{sample.step}/{sample.group}/{sample.index}", headers=fleet.headers).json()
        assert (trace["trained_as"], trace["checkpoint"]["step"]) == (3, 4)
        assert (trace["sample"]["policy_version"], trace["sample"]["replica"] != "") == (2, True)
        assert len(trace["group"]) == 6
        ratios.append(trace["ratio"])
        advantages.append(trace["advantage"])
    assert len(ratios) == 24
    assert min(advantages) == pytest.approx(row.values["critic/advantages/min"], abs=1e-6)
    assert max(advantages) == pytest.approx(row.values["critic/advantages/max"], abs=1e-6)
    assert statistics.fmean(ratios) == pytest.approx(row.values["actor/ratio_mean"], abs=1e-4)
    assert fleet.client.job(first.id).accelerator_hours["trainer"] > 0


def test_a_profiled_step_shows_its_costs_and_traces(fleet: Fleet, first: Job) -> None:
    found = fleet.client.profiles(first.id)
    assert [(profile.step, profile.of) for profile in found] == PROFILED
    for profile in found:
        seconds = [cost.seconds for cost in profile.costs]
        assert len(seconds) == 10
        assert seconds == sorted(seconds, reverse=True)
        assert any("mm" in cost.name for cost in profile.costs)  # matrix products of both
        part = {"trainer": "rank-0", "rollout": "rollout"}[profile.of]
        assert profile.files == [f"step-{profile.step:08d}-{part}.trace.json.gz"]
        url = f"{fleet.stack.url}/v1/jobs/{first.id}/profiles/{profile.files[0]}"
        trace = json.loads(gzip.decompress(httpx.get(url, headers=fleet.headers).content))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {cost.name for cost in profile.costs} <= names
    with pytest.raises(ApiError, match="it has no more steps to profile"):
        fleet.client.profile(first.id)
    missing = httpx.get(f"{fleet.stack.url}/v1/jobs/{first.id}/profiles/spec.json", headers=fleet.headers)
    assert (missing.status_code, "give a file of the list" in missing.text) == (422, True)


@pytest.mark.long
def test_the_same_seed_gives_the_same_curve_bit_for_bit(fleet: Fleet, small_job: MakeJob, first: Job) -> None:
    second = fleet.run(small_job())
    assert curve(fleet.metrics(first)) == curve(fleet.metrics(second))
    name = "pytorch_lora_weights.safetensors"
    one, two = (load_file(Path(job.results["model"]) / name) for job in (first, second))
    assert one.keys() == two.keys()
    assert all(bool((one[key] == two[key]).all()) for key in one)
    other = fleet.run(small_job(seed=2, **{"schedule.steps": 1}))
    assert curve(fleet.metrics(other))[0] != curve(fleet.metrics(first))[0]


@pytest.mark.parametrize("step_type", ["sde", pytest.param("cps", marks=pytest.mark.long)])
def test_full_fine_tuning_publishes_by_broadcast(fleet: Fleet, small_job: MakeJob, step_type: str) -> None:
    job = fleet.run(
        small_job(**{"trainer.mode": "full", "trainer.optimizer.lr": 1e-4, "rollout.noise.type": step_type})
    )
    assert_accounted(job, 4 * 24)
    assert all(row.values["rollout_corr/ratio_max"] == 1.0 for row in fleet.metrics(job))
    assert (Path(job.results["model"]) / "model_index.json").is_file()


@pytest.mark.long
def test_a_lora_job_after_a_full_one_starts_from_the_base_again(fleet: Fleet, small_job: MakeJob, first: Job) -> None:
    fleet.run(small_job(**{"trainer.mode": "full", "trainer.optimizer.lr": 1e-3, "schedule.steps": 1}))
    after = fleet.run(small_job(**{"schedule.steps": 1}))
    assert curve(fleet.metrics(after)) == curve(fleet.metrics(first))[:1]


@pytest.mark.long
def test_sampling_ahead_by_one_version(fleet: Fleet, small_job: MakeJob) -> None:
    job = fleet.run(small_job(**{"schedule.max_staleness": 1, "schedule.steps": 5}))
    assert_accounted(job, 5 * 24)
    stale = [row.values["training/off_policy/trajectory_staleness/mean"] for row in fleet.metrics(job)]
    assert all(value is not None and 0 <= value <= 1 for value in stale)
    assert max(value or 0 for value in stale) > 0


@pytest.mark.long
def test_pause_holds_and_resume_goes_on(fleet: Fleet, small_job: MakeJob) -> None:
    client = fleet.client
    job = client.submit(small_job())
    wait_until(lambda: client.job(job.id).progress.step >= 1)
    client.pause(job.id)
    wait_until(lambda: client.job(job.id).status == "paused")
    held = client.job(job.id).progress.step
    time.sleep(3.0)  # a step takes less
    assert client.job(job.id).progress.step <= held + 1  # what ran when it was paused may end
    client.resume(job.id)
    assert_accounted(client.wait(job.id, 240), 4 * 24)


def test_cancel_ends_a_job_and_the_next_one_runs(fleet: Fleet, small_job: MakeJob) -> None:
    client = fleet.client
    job = client.submit(small_job(**{"schedule.steps": 1000}))
    waiting = client.submit(small_job(**{"schedule.steps": 1}))  # waits for its turn
    assert client.job(waiting.id).status == "queued"
    wait_until(lambda: client.job(job.id).progress.step >= 1)
    client.cancel(job.id)
    assert client.wait(job.id, 60).status == "cancelled"
    assert client.wait(waiting.id, 240).status == "succeeded"


@pytest.mark.long
def test_best_and_worst_with_a_kl_reward_and_a_job_that_starts_where_it_was(fleet: Fleet, small_job: MakeJob) -> None:
    """Best and worst of each group, the KL in their reward, and a job from the checkpoint."""
    settings = {"algorithm.kl_reward": 0.5, "algorithm.best_of": 4, "trainer.deterministic": False}
    job = fleet.run(small_job(**settings))
    assert_accounted(job, 4 * 24)
    assert job.results["samples_dropped"] == {"not_best_or_worst": 4 * 4 * 2}
    kls = [row.values["critic/reference_kl/mean"] or 0.0 for row in fleet.metrics(job)]
    assert kls[0] == 0 < min(kls[1:])  # the first policy is the reference
    checkpoint = f"job:{job.id}@{max(point.step for point in fleet.client.checkpoints(job.id))}"
    again = fleet.run(small_job(**settings, **{"model.adapter": checkpoint, "schedule.steps": 1}))
    assert (fleet.metrics(again)[0].values["critic/reference_kl/mean"] or 0.0) > kls[1]  # of four steps, not of one
    assert (Path(again.results["model"]) / "pytorch_lora_weights.safetensors").is_file()
