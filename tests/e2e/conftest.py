"""Whole stacks of real processes, and small jobs on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowfleet.api.jobs import Job, MetricsRow
from flowfleet.client.client import Client
from flowfleet.job.spec import read_job_file
from flowfleet.local.plan import StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack
from flowfleet.local.stack import Stack
from flowfleet.process.forks import FORK_SERVER
from flowfleet.redis.client import connect_sync
from tests.forks import address
from tests.proxies import DEAD, PROXIES

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


@dataclass
class Fleet:
    """A running stack and a client of it."""

    stack: Stack
    client: Client

    @property
    def headers(self) -> dict[str, str]:
        """What shows the stack's key to its REST API."""
        return {"X-API-Key": self.stack.api_key}

    def run(self, job: dict[str, Any], timeout_s: float = DEADLINE_S) -> Job:
        return self.client.wait(self.client.submit(job).id, timeout_s)

    def metrics(self, job: Job) -> list[MetricsRow]:
        return [row for row in self.client.metrics(job.id) if "actor/loss" in row.values]

    def pid(self, name: str) -> int:
        """Current id of one of the supervisor's processes."""
        record = Path(self.stack.state_dir) / "processes" / f"{name}.json"
        return int(json.loads(record.read_text())["pid"])

    def trainer(self, job: Job) -> psutil.Process:
        """The torchrun agent of the job."""
        record = Path(self.stack.state_dir) / "trainers" / f"{job.id}.json"
        return psutil.Process(int(json.loads(record.read_text())["pid"]))


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Processes of stacks are forked from this worker's server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK_SERVER, address().to_text())
        yield


@pytest.fixture(scope="module")
def make_fleet(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A context manager that starts a stack: `with make_fleet(replicas=2) as fleet`."""

    @contextmanager
    def make(**options: Any) -> Iterator[Fleet]:
        usual: dict[str, Any] = {"rewards": ("ocr",), "model": str(ROOT / "recipes/tiny/model"), "port": 0}
        options = usual | options
        pool = {name: options.pop(name) for name in options.keys() & Pool.model_fields.keys()}
        options["pools"] = () if pool.get("replicas") == 0 else (Pool(**pool),)
        options["data_roots"] = (ROOT, tmp_path_factory.getbasetemp())
        state = tmp_path_factory.mktemp("stack")
        with ExitStack() as exits:
            with pytest.MonkeyPatch.context() as patch:  # no proxy stands between the services of one machine
                for name in PROXIES:
                    patch.setenv(name, DEAD)
                stack = exits.enter_context(local_stack(StackOptions(state_dir=state, **options)))
            yield Fleet(stack, exits.enter_context(Client(stack.url)))
            assert_nothing_refused(stack.redis_url)

    return make


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    """One stack with one replica for the tests of a module."""
    with make_fleet() as running:
        yield running


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few held-out prompts: enough to go through validation, few enough to be quick."""
    lines = (ROOT / "recipes/tiny/prompts/validation.txt").read_text().splitlines()[:16]
    path = tmp_path_factory.mktemp("prompts") / "validation.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def small_job(held_out: Path) -> Callable[..., dict[str, Any]]:
    """The demo's job, smaller: 4 steps of 4 prompts × 6 pictures in two updates, a checkpoint every second step.

    Settings are given by dotted names: `small_job(**{"trainer.mode": "full"})`.
    """

    def make(**changes: Any) -> dict[str, Any]:
        job = read_job_file(ROOT / "recipes/tiny_ocr.toml")
        small = {
            "name": "small",
            "model.path": str(ROOT / "recipes/tiny/model"),
            "data.train": str(ROOT / "recipes/tiny/prompts/train.txt"),
            "data.validation": str(held_out),
            "rollout.prompts_per_step": 4,
            "rollout.group_size": 6,
            "rollout.batch_size": 12,
            "trainer.micro_batch_size": 12,
            "trainer.threads": 1,
            "schedule.steps": 4,
            "schedule.save_every": 2,
            "schedule.validate_every": 2,
        }
        for name, value in (small | changes).items():
            *path, key = name.split(".")
            part = job
            for step in path:
                part = part.setdefault(step, {})
            part[key] = value
        return job

    return make


def assert_nothing_refused(redis_url: str) -> None:
    """No service met a command, key or channel that its Redis user may not use (flowfleet/redis/acl.py)."""
    with connect_sync(redis_url) as redis:
        refused = {(entry["username"], entry["object"]) for entry in redis.acl_log()}
    assert {what for what in refused if what[1] != "client"} == set()  # Redis 6 has no right to name the library alone


def assert_accounted(job: Job, num_samples: int) -> None:
    """Every sample asked for was trained on, or dropped with a reason."""
    assert job.status == "succeeded", job.reason
    assert job.results["samples_trained"] + sum(job.results["samples_dropped"].values()) >= num_samples
    if not job.results["samples_dropped"]:
        assert job.results["samples_trained"] == num_samples
