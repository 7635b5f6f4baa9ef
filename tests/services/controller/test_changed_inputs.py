"""A job whose model, adapter or data were changed under it pauses, and continues once they are put back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.rewards import RewardRevision
from flowfleet.job.fingerprints import CHANGED
from flowfleet.local.stack import RELOADED
from flowfleet.proto import reward_pb2, trainer_pb2
from services.controller.jobs import runner
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, ScriptedTrainer, scripted_fleet

PROMPTS = 'A red sign that says "K7QX"\n'


def by_index(sample: reward_pb2.RewardSample) -> float:
    return float(sample.sample_id.rpartition("/")[2])


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (tmp_path / "adapter" / "state.json").write_text("{}")
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return {
        "model": {"path": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")},
        "rewards": {"ocr": {}},
        "data": {"train": str(tmp_path / "prompts.txt")},
        "rollout": {"prompts_per_step": 1, "group_size": 2},
        "schedule": {"steps": 3},
    }


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": ScriptedReward(by_index)}) as fleet:
        yield fleet


def change(file: Path) -> None:
    file.write_text(2 * f"{file.read_text()}\n")


async def ended(fleet: ScriptedFleet, job_id: str) -> None:
    await fleet.store.jobs.request(job_id, "resume")
    record = await fleet.reached(job_id, lambda record: record.status.terminal)
    assert (record.status, record.reason) == (JobStatus.SUCCEEDED, "")


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("data.train", "prompts.txt"),
        ("model.path", "model/model_index.json"),
        ("model.adapter", "adapter/state.json"),
    ],
)
async def test_a_job_that_is_continued_pauses_for_an_input_that_was_changed_meanwhile(
    setting: str,
    place: str,
    settings: dict[str, Any],
    fleet: ScriptedFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "RESTART_DELAY_S", 0.05)
    file = tmp_path / place
    before = file.read_text()

    fleet.rollout.refuses = True  # the job begins, and waits
    record = await fleet.submit(settings)
    await fleet.reached(record.id, lambda record: record.status is JobStatus.RUNNING)
    await fleet.restart(lambda: change(file))
    record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
    assert record.reason.startswith(f"{setting}: ")
    assert CHANGED in record.reason
    await fleet.store.jobs.request(record.id, "resume")  # still another one
    record = await fleet.reached(record.id, lambda record: record.desired is Desired.PAUSED)
    assert CHANGED in record.reason
    file.write_text(before)
    fleet.rollout.refuses = False
    await ended(fleet, record.id)


async def test_what_the_trainer_and_a_replica_find_pauses_the_job(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured: list[trainer_pb2.ConfigureRequest] = []
    sees = {"trainer", "replica"}
    configure, publish = ScriptedTrainer.Configure, ScriptedTrainer.PublishWeights

    async def configuring(trainer: ScriptedTrainer, request: Any, context: Any) -> Any:
        configured.append(request)
        if "trainer" in sees:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"model.path: m {CHANGED}")
        return await configure(trainer, request, context)

    async def publishing(trainer: ScriptedTrainer, request: Any, context: Any) -> Any:
        if "replica" not in sees:
            return await publish(trainer, request, context)
        results = [trainer_pb2.PublishResult(replica_id="r0", ok=False, error=f"model.path: m {CHANGED}")]
        return trainer_pb2.PublishWeightsResponse(version=request.version, results=results)

    monkeypatch.setattr(ScriptedTrainer, "Configure", configuring)
    monkeypatch.setattr(ScriptedTrainer, "PublishWeights", publishing)
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": ScriptedReward(by_index)}) as fleet:
        record = await fleet.submit(settings)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.reason == f"model.path: m {CHANGED}"
        assert configured[0].inputs.keys() == {"model.path", "model.adapter", "data.train"}
        sees.remove("trainer")
        await fleet.store.jobs.request(record.id, "resume")
        record = await fleet.reached(record.id, lambda record: record.reason.startswith("replica"))
        assert record.reason == f"replica r0: model.path: m {CHANGED}"
        sees.remove("replica")
        await ended(fleet, record.id)


@pytest.mark.parametrize("accepting", ["put back", "reload", "set"])
async def test_another_file_of_a_reward_pauses_the_job_until_its_user_decides(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], accepting: str
) -> None:
    reward = ScriptedReward(by_index, name="ocr", version="sha256:aaa")
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": reward}) as fleet:
        record = await fleet.submit(settings | {"schedule": {"steps": 40}})
        await fleet.reached(record.id, lambda record: record.progress.step >= 1)
        reward.described["version"] = reward.version = "sha256:bbb"
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.reason.startswith(f"rewards.ocr: its file {CHANGED} (sha256:aaa, now sha256:bbb): put the former")
        await fleet.store.jobs.request(record.id, "resume")
        held = await fleet.reached(record.id, lambda record: record.desired is Desired.PAUSED and bool(record.reason))
        assert CHANGED in held.reason
        if accepting == "put back":
            reward.described["version"] = reward.version = "sha256:aaa"
        elif accepting == "reload":
            (tmp_path / "state" / RELOADED).write_text('{"ocr": "sha256:bbb"}')
        else:
            again = RewardRevision(number=1, rewards=record.spec["rewards"], changes=["set ocr {}"], open_steps=True)
            await fleet.store.rewards.change(record.id, again)
        await ended(fleet, record.id)


async def test_a_file_that_a_scoring_process_finds_changed_pauses_the_job(
    redis_url: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    reward = ScriptedReward(by_index, name="ocr", version="sha256:aaa")
    reward.refuses = f"the file of my:score {CHANGED}"
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": reward}) as fleet:
        record = await fleet.submit(settings)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.reason.startswith(f"rewards.ocr: the file of my:score {CHANGED}: put the former file back")
        assert not record.results.get("samples_dropped")
        reward.refuses = ""
        await ended(fleet, record.id)
