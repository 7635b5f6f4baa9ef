"""The local launcher with real processes: adopt, notice death, end the whole group."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.process import forks
from flowfleet.rpc.kinds import JOB_ACCEPT, job_token
from services.controller.platforms.local import fork_server
from services.controller.platforms.local import launcher as module
from services.controller.platforms.local.launcher import LocalLauncher
from tests.waiting import until


@pytest.fixture
def spec() -> JobSpec:
    return parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    monkeypatch.delenv(forks.FORK_SERVER, raising=False)
    monkeypatch.setattr(module, "TRAINER", "tests.services.controller.fake_trainer")
    return LocalLauncher(tmp_path)


async def test_a_trainer_is_adopted_by_the_next_controller(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path
) -> None:
    assert not await launcher.alive("job")
    assert await launcher.ensure("job", spec) == "127.0.0.1:4711"
    record = (tmp_path / "trainers" / "job.json").read_text()
    second = LocalLauncher(tmp_path)
    assert await second.ensure("job", spec) == "127.0.0.1:4711"
    assert (tmp_path / "trainers" / "job.json").read_text() == record
    await second.stop("job")
    assert not await launcher.alive("job")


@pytest.mark.parametrize("mode", [0o664, 0o666])
async def test_a_trainer_of_an_earlier_release_is_adopted_and_ended(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, mode: int
) -> None:
    """Earlier ones heeded the umask."""
    await launcher.ensure("job", spec)
    pid, record = _pid(tmp_path), tmp_path / "trainers" / "job.json"
    record.chmod(mode)
    record.parent.chmod(0o777)
    second = LocalLauncher(tmp_path)
    await second.ensure("job", spec)
    assert _pid(tmp_path) == pid
    assert await second.alive("job")
    await second.stop("job", at_once=True)
    assert _gone(pid)


async def test_a_killed_trainer_is_noticed_and_started_again(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path
) -> None:
    async with asyncio.timeout(30):
        await launcher.ensure("job", spec)
        pid, child = _pid(tmp_path), int((tmp_path / "trainers" / "job.port.child").read_text())
        os.kill(pid, signal.SIGKILL)
        while await launcher.alive("job"):
            await asyncio.sleep(0.01)
        await launcher.ensure("job", spec)
        assert _pid(tmp_path) != pid
        assert _gone(child)
        await launcher.stop("job")


@types.coroutine
def cancelled_at(wanted: int, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, bool]:
    """Cancels the task at its await of that number. True where the coroutine was done before."""
    task, steps = asyncio.current_task(), coroutine.__await__()
    assert task is not None
    for number in itertools.count():
        try:
            future = next(steps)
        except StopIteration:
            return True
        if number == wanted:
            task.cancel()
        try:
            yield future
        except asyncio.CancelledError as error:
            with contextlib.suppress(StopIteration, asyncio.CancelledError):
                steps.throw(error)
            task.uncancel()
            return False
    raise AssertionError


async def test_a_start_that_is_cancelled_anywhere_leaves_no_trainer_to_another_job(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was cancelled its own trainer does not run, or `stop` ends it; the next job's record is of its own."""
    monkeypatch.setattr(fork_server, "POLL_S", 0.1)  # a dozen awaits
    monkeypatch.setattr(module, "POLL_S", 0.1)
    for number in itertools.count():
        folder = tmp_path / str(number)
        fresh = LocalLauncher(folder)
        is_done = await cancelled_at(number, fresh.ensure("cancelled", spec))
        await fresh.ensure("next", spec)
        rank = int((folder / "trainers" / "next.port.rank0").read_text())
        assert os.getpgid(rank) == _pid(folder, "next")
        await fresh.stop("next")
        assert _gone(rank)
        await fresh.stop("cancelled")
        left = folder / "trainers" / "cancelled.port.rank0"
        assert not left.exists() or _gone(int(left.read_text()))
        fresh._forks._server.close()
        if is_done:
            assert number > 2
            return


async def test_a_trainer_runs_nothing_where_its_record_cannot_be_written(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalLauncher, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            await launcher.ensure("job", spec)
    await asyncio.sleep(0.5)
    assert not (tmp_path / "trainers" / "job.port.rank0").exists()


async def test_a_trainer_is_not_handed_the_controllers_secrets(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"API_KEY": "key", "RPC_TOKEN": "c", "REDIS_URL": "redis://controller:c@h", "REWARD_RPC_TOKEN": "r"}
    for name, value in {**own, "TRAINER_RPC_TOKEN": "t", "TRAINER_REDIS_URL": "redis://trainer:t@h"}.items():
        monkeypatch.setenv(f"FLOWFLEET_{name}", value)

    async with asyncio.timeout(30):
        await launcher.ensure("job", spec)
        environment = _environment(_pid(tmp_path))
        await launcher.stop("job")
    given = {name: value for name, _, value in (word.partition("=") for word in environment)}
    assert (given["FLOWFLEET_RPC_TOKEN"], given["FLOWFLEET_REDIS_URL"]) == ("t", "redis://trainer:t@h")
    assert launcher._variables("job", 1)[JOB_ACCEPT] == hashlib.sha256(str(job_token("job")).encode()).hexdigest()
    assert not {*own.values()} & {*given.values()}


async def test_a_record_that_a_power_cut_left_empty_is_no_trainer(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "job.json").touch()
    assert await launcher.alive("job") is False
    await launcher.keep_only([])


async def test_stopping_ends_the_whole_group(launcher: LocalLauncher, spec: JobSpec, tmp_path: Path) -> None:
    await launcher.ensure("job", spec)
    child = int((tmp_path / "trainers" / "job.port.child").read_text())
    await launcher.stop("job")
    assert _gone(child)
    assert not (tmp_path / "trainers" / "job.json").exists()


HALF_ENDED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def half_ended() -> int:
    """The process whose first thread has ended while another continues."""
    process = subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    while "Z" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]:
        time.sleep(0.01)
    return process.pid


async def test_a_trainer_whose_first_thread_has_ended_leaves_no_zombie(launcher: LocalLauncher, tmp_path: Path) -> None:
    """The agent of torchrun sometimes ends like this: it no longer runs and cannot be waited for yet."""
    pid = half_ended()
    (tmp_path / "trainers").mkdir(exist_ok=True)
    (tmp_path / "trainers/job.json").write_text(f'{{"pid": {pid}, "started": "1", "port_file": "x"}}')
    await launcher.stop("job")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_trainers_of_other_jobs_are_ended(launcher: LocalLauncher, spec: JobSpec, tmp_path: Path) -> None:
    await launcher.ensure("kept", spec)
    await launcher.ensure("left", spec)
    await LocalLauncher(tmp_path).keep_only(["kept", "queued"])
    assert await launcher.alive("kept")
    assert not await launcher.alive("left")
    await launcher.keep_only([])
    assert not await launcher.alive("kept")


async def test_a_trainer_that_ends_while_starting_names_its_log(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "trainer_flags", lambda _: ["--fail", "no GPU"])
    with pytest.raises(RuntimeError, match=r"its log is .*jobs/job/logs/trainer\.log"):
        await launcher.ensure("job", spec)
    assert "no GPU" in (tmp_path / "jobs/job/logs/trainer.log").read_text()


async def test_the_logs_of_the_last_three_attempts_are_in_the_jobs_folder(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(5):
        monkeypatch.setattr(module, "trainer_flags", lambda _, number=attempt: ["--fail", f"attempt {number}"])
        with pytest.raises(RuntimeError, match="its log is"):
            await launcher.ensure("job", spec)
    logs = sorted((tmp_path / "jobs/job/logs").iterdir())
    assert [path.name for path in logs] == ["trainer.log", "trainer.log.1", "trainer.log.2"]
    assert [f"attempt {4 - number}" in path.read_text() for number, path in enumerate(logs)] == [True] * 3


async def test_a_trainer_gets_an_accelerator_a_rank(launcher: LocalLauncher, spec: JobSpec, tmp_path: Path) -> None:
    two = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"world_size": 2})})
    confined = LocalLauncher(tmp_path, devices=("5", "2", "7"))
    await confined.ensure("job", two)
    await confined.stop("job")
    assert (tmp_path / "trainers" / "job.port.devices").read_text() == "5,2"


async def test_a_trainer_of_more_ranks_than_accelerators_is_refused(tmp_path: Path, spec: JobSpec) -> None:
    two = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"world_size": 2})})
    with pytest.raises(ValueError, match=r"trainer.world_size = 2: .* 1 accelerators here \(3\).*set it to at most 1"):
        await LocalLauncher(tmp_path, devices=("3",)).ensure("job", two)


async def test_a_rank_that_is_killed_ends_the_trainer_at_once(
    launcher: LocalLauncher, spec: JobSpec, tmp_path: Path
) -> None:
    two = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"world_size": 2})})
    async with asyncio.timeout(30):
        await launcher.ensure("job", two)
        ranks = [tmp_path / "trainers" / f"job.port.rank{rank}" for rank in (0, 1)]
        await until(lambda: all(rank.exists() and rank.read_text() for rank in ranks))
        first, second = (int(rank.read_text()) for rank in ranks)
        os.kill(second, signal.SIGKILL)
        killed = time.monotonic()
        while await launcher.alive("job"):
            await asyncio.sleep(0.01)
        assert time.monotonic() - killed < 2
        assert _gone(first)
    assert "rank 1 was killed by signal 9" in (tmp_path / "jobs/job/logs/trainer.log").read_text()
    assert (tmp_path / "trainers" / "job.port.world").read_text() == "2"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_trainers_live_on_without_the_process_that_they_were_forked_from(
    launcher: LocalLauncher, spec: JobSpec, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(forks, "FORK_S", 0.5)
    async with asyncio.timeout(30):
        await launcher.ensure("one", spec)
        process = launcher._forks._server._process
        assert process is not None
        os.kill(process.pid, number)
        await launcher.ensure("two", spec)
        assert await launcher.alive("one")
        assert await launcher.alive("two")
        await launcher.keep_only([])


async def test_a_stopped_trainer_is_killed_at_once(launcher: LocalLauncher, spec: JobSpec, tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        await launcher.ensure("job", spec)
        rank = int((tmp_path / "trainers" / "job.port.rank0").read_text())
        for pid in (_pid(tmp_path), rank):
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        await launcher.stop("job", at_once=True)
        assert _gone(rank)
        assert time.monotonic() - started < 5


async def test_a_reused_pid_is_not_taken_for_the_trainer(tmp_path: Path) -> None:
    directory = tmp_path / "trainers"
    directory.mkdir()
    (directory / "job.json").write_text(f'{{"pid": {os.getpid()}, "started": "1", "port_file": "x"}}')
    assert not await LocalLauncher(tmp_path).alive("job")


def _pid(directory: Path, job: str = "job") -> int:
    return int(json.loads((directory / "trainers" / f"{job}.json").read_text())["pid"])


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
