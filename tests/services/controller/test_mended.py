"""What a job was admitted with and cannot be read later pauses it; mended and resumed, it continues."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from services.controller.jobs import runner
from services.controller.limits import Limits
from services.controller.prompts.inputs import Inputs
from services.controller.reading.places import NotAllowed
from tests.services.controller.scripted import ScriptedReward
from tests.services.controller.test_control_plane import Job, Run, by_index, job, run

__all__ = ["job", "run"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RESTART_DELAY_S", 0.05)


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "a former root": (lambda _: None, {"data_roots": ()}, "--data-root"),
    "a file that is gone": (Path.unlink, {}, "prompts cannot be read"),
    "a file that is empty": (lambda path: path.write_text(""), {}, "prompts.txt"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_job_that_cannot_be_opened_again_pauses_and_so_does_the_queued_one(
    run: Run, job: Job, tmp_path: Path, how: str
) -> None:
    breaks, settings, told = BROKEN[how]
    prompts = tmp_path / "prompts.txt"
    text = prompts.read_text()

    async with run(ocr=ScriptedReward(by_index)) as fleet:
        first = await fleet.submit(job(rewards={"ocr": {}}, schedule={"steps": 12}))
        second = await fleet.submit(job(rewards={"ocr": {}}))
        await fleet.reached(first.id, lambda record: record.progress.step > 0)
        async with fleet.trainer.turn:
            await fleet.restart(lambda: breaks(prompts), **settings)
            paused = await fleet.reached(first.id, lambda record: record.status is JobStatus.PAUSED)
        assert told in paused.reason
        assert "flowfleet resume" in paused.reason
        assert (await fleet.store.jobs.get(second.id)).status is JobStatus.QUEUED
        await fleet.restart(lambda: prompts.write_text(text))
        await fleet.store.jobs.request(first.id, "resume")
        for job_id in (first.id, second.id):
            assert (await fleet.reached(job_id, lambda one: one.status.terminal)).status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("where", ["URL", "file of an earlier release's job"])
async def test_data_that_no_submit_counted_count_when_they_are_read(
    run: Run, job: Job, tmp_path: Path, where: str
) -> None:
    """The bytes of remote data are known when the job opens them; then they have the room of all, or the job pauses."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_port}"
    train = f"{url}/prompts.txt" if where == "URL" else str(tmp_path / "prompts.txt")
    allowed: dict[str, Any] = {"data_urls": (url,), "data_networks": ("127.0.0.0/8",)}
    with site:
        async with run(ocr=ScriptedReward(by_index)) as fleet:
            await fleet.restart(**allowed, limits=Limits(data_bytes=20))
            found = await fleet.submit(job(rewards={"ocr": {}}, data={"train": train}))
            paused = await fleet.reached(found.id, lambda record: record.status is JobStatus.PAUSED)
            size = int(re.findall(r"would take (\d+) bytes, (\d+) of them this job's", paused.reason)[0][1])
            assert size > 20
            assert "have the operator raise --limit data_bytes; then `flowfleet resume` the job" in paused.reason
            await fleet.restart(**allowed, limits=Limits(data_bytes=size))
            await fleet.store.jobs.request(found.id, "resume")
            done = await fleet.reached(found.id, lambda record: record.status.terminal)
            assert (done.status, done.data_bytes) == (JobStatus.SUCCEEDED, size)
        site.shutdown()


async def test_a_queued_job_that_may_not_be_read_any_more_pauses_and_can_be_cancelled(run: Run, job: Job) -> None:
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        await fleet.restart(data_roots=())
        found = await fleet.submit(job(rewards={"ocr": {}}))
        await fleet.reached(found.id, lambda record: record.status is JobStatus.PAUSED)
        await fleet.store.jobs.request(found.id, "cancel")
        await fleet.reached(found.id, lambda record: record.status is JobStatus.CANCELLED)


async def test_pictures_that_may_not_be_read_any_more_pause_the_job(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, allowed = Inputs.attach, False

    async def attached(inputs: Inputs, *request: Any) -> None:
        if not allowed:
            raise NotAllowed("a.png leads outside the folders: give another --data-root")
        await attach(inputs, *request)

    monkeypatch.setattr(Inputs, "attach", attached)

    async with run(ocr=ScriptedReward(by_index)) as fleet:
        found = await fleet.submit(job(rewards={"ocr": {}}))
        paused = await fleet.reached(found.id, lambda record: record.status is JobStatus.PAUSED)
        assert paused.reason.startswith("a.png leads outside the folders")
        allowed = True
        await fleet.store.jobs.request(found.id, "resume")
        ended = await fleet.reached(found.id, lambda record: record.status.terminal)
        assert (ended.status, ended.progress.samples_dropped) == (JobStatus.SUCCEEDED, {})


async def test_a_trainer_that_cannot_load_any_more_pauses_a_job_that_has_begun(run: Run, job: Job) -> None:
    """Such as a model that was moved. A job that never began fails."""

    async with run(ocr=ScriptedReward(by_index)) as fleet:
        found = await fleet.submit(job(rewards={"ocr": {}}, schedule={"steps": 12}))
        await fleet.reached(found.id, lambda record: record.progress.step > 0)
        async with fleet.trainer.turn:
            fleet.trainer.refuses = "model.path: there is no folder m"
            await fleet.restart()
            paused = await fleet.reached(found.id, lambda record: record.status is JobStatus.PAUSED)
        assert "there is no folder m" in paused.reason
        fleet.trainer.refuses = ""
        await fleet.store.jobs.request(found.id, "resume")
        await fleet.reached(found.id, lambda record: record.status is JobStatus.SUCCEEDED)
        fleet.trainer.refuses = "model.path: there is no folder m"
        never = await fleet.submit(job(rewards={"ocr": {}}))
        while not (ended := await fleet.store.jobs.status(never.id)).terminal:
            await asyncio.sleep(0.02)
        assert ended is JobStatus.FAILED
