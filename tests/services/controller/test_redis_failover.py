"""A running job, a controller that asks for acknowledgments, and failovers by real Sentinels: one that loses nothing
that was acknowledged, and one that does."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowfleet.redis import keys
from services.controller.store.replication import NAME
from tests.flowfleet.sentinels import Group
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, scripted_fleet
from tests.waiting import until

pytestmark = pytest.mark.long
STEPS = 200


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    started = Group(tmp_path / "group")
    yield started
    started.kill()


@asynccontextmanager
async def running(group: Group, tmp_path: Path) -> AsyncIterator[tuple[ScriptedFleet, str]]:
    """A fleet, and a job that has done steps which a replica acknowledged."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    job = {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(prompts)},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 4},
        "schedule": {"steps": STEPS, "save_every": 10, "keep_last": 1},
    }
    rewards = {"ocr": ScriptedReward(lambda sample: int(sample.sample_id.rpartition("/")[2]) / 4)}
    async with scripted_fleet(group.url, tmp_path / "state", rewards, redis_acks=1) as fleet, asyncio.timeout(150):
        record = await fleet.submit(job)
        await fleet.reached(record.id, lambda now: now.progress.step >= 3)
        yield fleet, record.id


def noted(tmp_path: Path) -> int:
    file = tmp_path / "state" / NAME
    return int(json.loads(file.read_text())["number"]) if file.exists() else 0


async def succeeds(fleet: ScriptedFleet, job_id: str) -> None:
    record = await fleet.succeeded(job_id)
    assert (record.progress.samples_trained, record.results["samples_dropped"]) == (4 * STEPS, {})


async def test_a_failover_that_loses_nothing_acknowledged_is_a_pause(group: Group, tmp_path: Path) -> None:
    losses: set[str] = set()
    async with running(group, tmp_path) as (fleet, job_id):
        await until(lambda: noted(tmp_path) >= 2)
        before = (await fleet.store.jobs.get(job_id)).progress.step
        group.primary.kill()
        number = noted(tmp_path)

        def goes_on() -> bool:
            losses.add(fleet.runner.loss)
            return noted(tmp_path) > number

        await until(goes_on)
        assert before < STEPS
        assert (await fleet.redis.info("server"))["tcp_port"] in [replica.port for replica in group.replicas]
        await succeeds(fleet, job_id)
    assert losses == {""}


async def test_a_failover_that_loses_acknowledged_writes_waits_for_an_operator(group: Group, tmp_path: Path) -> None:
    kept, behind = group.replicas
    async with running(group, tmp_path) as (fleet, job_id):
        behind.process.send_signal(signal.SIGSTOP)
        group.primary.client().client_kill_filter(_type="replica")  # else the kernel keeps what it was sent
        number = noted(tmp_path)
        await until(lambda: noted(tmp_path) >= number + 3)
        group.primary.kill()
        kept.kill()
        behind.process.send_signal(signal.SIGCONT)

        await until(lambda: fleet.runner.loss != "")
        assert "its replicas had " in fleet.runner.loss
        assert "accept the loss by removing " in fleet.runner.loss
        assert (fleet.runner.alive, fleet.runner.leads) == (True, False)
        at = int(behind.client().get(keys.acknowledged()) or b"")
        assert at < noted(tmp_path)
        steps = len(fleet.trainer.steps)

        kept.start()  # with its own, newer writes, which it loses as it follows the new primary
        await until(kept.answers)
        kept.client().replicaof("127.0.0.1", behind.port)
        await until(lambda: kept.client().info("replication")["master_link_status"] == "up")
        await asyncio.sleep(2)
        assert (fleet.runner.leads, len(fleet.trainer.steps), noted(tmp_path) > at) == (False, steps, True)

        (tmp_path / "state" / NAME).unlink()
        await until(lambda: fleet.runner.leads)
        await succeeds(fleet, job_id)
        assert (fleet.runner.loss, noted(tmp_path) > at) == ("", True)
