"""What a job does about lost checkpoints, ledgers of other versions, and trainers that end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.proto import trainer_pb2
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import Checkpoint, EnsureTrainer, Export, TrainStep
from services.controller.job.machine.ledger import Ledger
from services.controller.job.machine.state import LEDGER_FORMAT
from services.controller.job.machine.state_machine import Machine
from services.controller.job.recovery import retries
from services.controller.job.recovery.retries import FailureAction, decide
from services.controller.platforms.local.launcher import LocalLauncher
from services.controller.store.leadership import Lease
from tests.services.controller.scripted import (
    ScriptedFleet,
    ScriptedLauncher,
    ScriptedReward,
    ScriptedTrainer,
    scripted_fleet,
)

SPEC = {"model": {"path": "m"}, "data": {"train": "t"}, "rewards": {"ocr": {}}}
STEPS, PROMPTS, GROUP = 5, 2, 3


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.txt").write_text("a\nb\nc\n")
    return {
        "name": "resumed",
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(tmp_path / "train.txt")},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP},
        "schedule": {"steps": STEPS, "save_every": 2, "keep_last": 1},
    }


def fleet(redis_url: str, tmp_path: Path) -> Any:
    return scripted_fleet(redis_url, tmp_path / "state", {"ocr": ScriptedReward(lambda sample: len(sample.prompt))})


async def events(running: ScriptedFleet, job_id: str, kind: str) -> list[dict[str, Any]]:
    found = await running.store.events.read(job_id, limit=1000)
    return [dict(event.data) for event in found if event.type == kind]


async def test_a_trainer_without_any_checkpoint_begins_the_job_anew(
    job: dict[str, Any], redis_url: str, tmp_path: Path
) -> None:
    """Its ledger is ahead, and the requests to catch up with are gone with the checkpoint that covered them."""
    async with fleet(redis_url, tmp_path) as running:
        record = await running.submit(job)
        await running.reached(record.id, lambda found: found.progress.step >= 3)
        running.trainer.steps.clear()
        record = await running.succeeded(record.id)
        assert [request.step for request in running.trainer.steps] == list(range(STEPS))
        per_step = PROMPTS * GROUP
        lost = record.results["samples_dropped"]["checkpoint_lost"]
        assert record.results["samples_trained"] == STEPS * per_step
        assert 3 * per_step <= lost <= STEPS * per_step
        (told,) = await events(running, record.id, "rewound")
        assert told["version"] == 0
        assert told["from"] == lost // per_step or told["from"] + 1 == -(-lost // per_step)
        assert [one.step for one in await running.store.history.checkpoints(record.id)] == [STEPS]


async def test_what_a_trainer_set_aside_is_an_event_once(
    job: dict[str, Any], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the trainer is configured and tells it."""
    aside = trainer_pb2.SetAside(step=2, path="step-00000002.aside-1", reason="its digest is another")
    configure, train = ScriptedTrainer.Configure, ScriptedTrainer.TrainStep
    calls: list[Any] = []
    failed: list[Any] = []

    async def with_aside(self: Any, request: Any, context: Any) -> trainer_pb2.ConfigureResponse:
        calls.append(request)
        response = await configure(self, request, context)
        response.set_aside.append(aside)
        return response

    async def fails_once(self: Any, request: Any, context: Any) -> trainer_pb2.TrainStepResponse:
        if not failed:
            failed.append(request)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another job's")
        return await train(self, request, context)

    monkeypatch.setattr(ScriptedTrainer, "Configure", with_aside)
    monkeypatch.setattr(ScriptedTrainer, "TrainStep", fails_once)
    async with fleet(redis_url, tmp_path) as running:
        record = await running.run(job)
        assert len(calls) >= 2
        told = await events(running, record.id, "checkpoint_set_aside")
        assert told == [{"step": aside.step, "path": aside.path, "reason": aside.reason}]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_trainer_that_ends_by_its_own_error_fails_the_job_with_its_words(
    code: grpc.StatusCode, job: dict[str, Any], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the call broke, or rank 0 still answered that it failed inside."""

    async def words(self: ScriptedLauncher, job_id: str) -> str:
        return "OutOfMemoryError: tried to allocate 2 GiB"

    async def gone(self: Any, request: Any, context: Any) -> None:
        await context.abort(code, "Connection refused")

    monkeypatch.setattr(retries, "MAX_FAILURES", 2)
    monkeypatch.setattr(ScriptedLauncher, "termination_message", words)
    monkeypatch.setattr(ScriptedTrainer, "Configure", gone)
    async with fleet(redis_url, tmp_path) as running:
        record = await running.ended((await running.submit(job)).id)
        assert record.status is JobStatus.FAILED
        assert record.reason == "EnsureTrainer: the trainer ended: OutOfMemoryError: tried to allocate 2 GiB"


async def test_the_words_of_a_trainer_that_ends_in_a_step_are_heard_though_the_next_one_clears_them(
    job: dict[str, Any], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call to the one that ended breaks only when the next one has started, each time."""
    words, ended = "", asyncio.Event()

    async def alive(self: ScriptedLauncher, job_id: str) -> bool:
        return not words

    async def told(self: ScriptedLauncher, job_id: str) -> str:
        return words

    async def ensure(self: ScriptedLauncher, job_id: str, spec: JobSpec) -> str:
        nonlocal words
        words = ""
        ended.set()
        return self.address

    async def ends(self: Any, request: Any, context: Any) -> None:
        nonlocal words
        ended.clear()
        words = "rank 1: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"
        await ended.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")

    monkeypatch.setattr(retries, "MAX_FAILURES", 2)
    for name, method in (("alive", alive), ("termination_message", told), ("ensure", ensure)):
        monkeypatch.setattr(ScriptedLauncher, name, method)
    monkeypatch.setattr(ScriptedTrainer, "TrainStep", ends)
    async with fleet(redis_url, tmp_path) as running:
        record = await running.ended((await running.submit(job)).id)
        assert record.status is JobStatus.FAILED
        assert record.reason == "TrainStep: the trainer ended: rank 1: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"


async def test_a_trainer_that_starts_while_the_last_words_are_read_is_not_lost(
    job: dict[str, Any], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_alive, asked, ensured, heard, train = False, 0, 0, asyncio.Event(), ScriptedTrainer.TrainStep

    async def alive(self: ScriptedLauncher, job_id: str) -> bool:
        return is_alive

    async def told(self: ScriptedLauncher, job_id: str) -> str:
        nonlocal is_alive, asked
        is_alive, asked = True, asked + 1
        asyncio.get_running_loop().call_later(0.5, heard.set)
        return ""

    async def ensure(self: ScriptedLauncher, job_id: str, spec: JobSpec) -> str:
        nonlocal ensured
        ensured += 1
        return self.address

    async def waits(self: Any, request: Any, context: Any) -> Any:
        await heard.wait()
        return await train(self, request, context)

    for name, method in (("alive", alive), ("termination_message", told), ("ensure", ensure)):
        monkeypatch.setattr(ScriptedLauncher, name, method)
    monkeypatch.setattr(ScriptedTrainer, "TrainStep", waits)
    async with fleet(redis_url, tmp_path) as running:
        await running.run(job)
        assert (asked, ensured) == (1, 1)


def test_people_are_waited_for_by_who_needs_them() -> None:
    """Waits for people are those for room on a disk or another version of Flowfleet; failures that a restart may cure
    are unchanged."""
    full, other = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED
    for failures in (1, 5, 1000):
        assert decide(Checkpoint(2), full, failures).action is FailureAction.RETRY
        assert decide(Export(), full, failures).action is FailureAction.RETRY
        assert decide(EnsureTrainer(), other, failures).action is FailureAction.RETRY
        assert decide(TrainStep(0), full, failures).action is FailureAction.RETRY
        assert decide(TrainStep(0), other, failures).action is FailureAction.FAIL_JOB


@pytest.mark.parametrize("kind", ["snapshot", "event"])
async def test_a_ledger_of_another_version_waits_with_words_and_can_be_cancelled(
    kind: str, job: dict[str, Any], redis_url: str, tmp_path: Path
) -> None:
    async with fleet(redis_url, tmp_path) as running:
        record, _ = await running.store.jobs.create(parse_job(job))
        if kind == "snapshot":
            newer = Machine(parse_job(job)).state.model_copy(update={"format": LEDGER_FORMAT + 1})
            await running.redis.set(keys.job_key(record.id, "state"), newer.model_dump_json())
        else:
            await running.redis.rpush(keys.job_key(record.id, "ledger"), b'{"kind": "from_the_future"}')
        await running.runner.notify()
        waiting = await running.reached(record.id, lambda found: bool(found.reason))
        assert not waiting.status.terminal
        assert "run the version of Flowfleet that wrote it, or cancel the job" in waiting.reason
        await running.store.jobs.request(record.id, "cancel")
        assert (await running.ended(record.id)).status == "cancelled"


async def test_a_ledger_without_a_format_is_of_the_first(redis_url: str) -> None:
    async def run() -> Machine:
        redis = connect(redis_url)
        await redis.set(keys.job_key("before", "state"), '{"version": 3, "published": 3}')
        await redis.rpush(keys.job_key("before", "ledger"), ev.event_to_json(ev.Checkpointed(version=2)))
        try:
            return await Ledger(redis, Lease(redis, CollectorRegistry()), "before").restore(parse_job(SPEC))
        finally:
            await redis.aclose()

    machine = await run()
    assert (machine.state.version, machine.state.checkpointed, machine.state.format) == (3, 2, 1)


@pytest.mark.long
async def test_a_local_trainer_leaves_its_words_with_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, that finds no device of this name."""
    monkeypatch.setenv("FLOWFLEET_DEVICE", "nonsense")
    launcher = LocalLauncher(tmp_path)
    spec = parse_job(SPEC)
    assert await launcher.termination_message("job") == ""
    with pytest.raises(RuntimeError, match=r"while starting: rank 0: \w+: .*nonsense.*; its log is"):
        await launcher.ensure("job", spec)
    assert "nonsense" in await launcher.termination_message("job")
    await launcher.stop("job")
