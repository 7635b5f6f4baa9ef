"""A trainer of two ranks under the controller's judgment: a long compilation is let be, a rank that stands still is
named in time."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import TimeoutPart
from flowfleet.proto import trainer_pb2
from services.controller.job.trainer.hangs import HangJudge, Progress
from services.controller.job.trainer.watch import ANSWER_S, LOOK_S, told_by
from services.trainer.beats import CARRY_S, Beats, Phase, limit_s, silence_s
from tests.forks import start
from tests.services.trainer.processes import Launch, Trainer
from tests.services.trainer.steps import Drawer, make_spec
from tests.waiting import wait_until

HANG_S = 5.0


def heard(trainer: Trainer) -> list[Progress] | None:
    try:
        status = trainer.stub.GetStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=ANSWER_S)
    except grpc.RpcError:
        return None
    return [told_by(one) for one in status.ranks]


def test_no_rank_is_inside_the_store_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter may end then; a thread that comes back from the store would abort it."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    before = set(threading.enumerate())
    ranks = [Beats(rank, 2) for rank in range(2)]
    for beats in ranks:
        beats.carry()
    assert len(set(threading.enumerate()) - before) == 2
    wait_until(lambda: [one.rank for one in ranks[0].progress()] == [0, 1])
    for beats in ranks:
        beats.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("hang_s", "expected"), [(120.0, 600.0), (1200.0, 1200.0)])
def test_a_silent_compilation_is_found_long_before_its_limit(hang_s: float, expected: float) -> None:
    timeouts = TimeoutPart(hang_s=hang_s)
    assert silence_s(Phase.COMPILE, timeouts) == expected < limit_s(Phase.COMPILE, timeouts)
    assert {silence_s(phase, timeouts) for phase in set(Phase) - {Phase.COMPILE}} == {hang_s}


def test_a_suspended_rank_is_named_in_time_whatever_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later while it may hold the interpreter's lock, which looks the same."""
    hang_s, phases = 1.0, [Phase.IDLE, *Phase]
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "HANG_S": str(hang_s)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    first = Beats(0, len(phases))
    first.carry()
    ranks = [
        start(
            [sys.executable, "-m", "tests.services.trainer.phased", phase],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(phases))},
            output=2,
        )
        for rank, phase in enumerate(phases[1:], 1)
    ]
    judges = {phase: HangJudge(hang_s) for phase in Phase}
    found: dict[str, str] = {}

    def look() -> None:
        told = [told_by(one) for one in first.progress()]
        for phase, judge in judges.items():
            if reason := judge.look(time.monotonic(), [told[0], told[phases.index(phase, 1)]]):
                found.setdefault(phase, reason)

    try:
        wait_until(lambda: {one.phase for one in first.progress()[1:]} == set(Phase))
        for rank in ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        while time.monotonic() - stopped < hang_s + 2 * CARRY_S:
            look()
            time.sleep(CARRY_S / 5)
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
            rank.wait(30)
        first.close()
    assert found.keys() == set(Phase) - {Phase.COMPILE}
    for phase, reason in found.items():
        assert f"rank {phases.index(Phase(phase), 1)} (phase {phase}) gave no sign for" in reason


@pytest.mark.long
def test_a_long_compilation_is_let_be_and_a_stopped_rank_is_named(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_COMPILE_S", str(int(3 * HANG_S)))
    spec = make_spec(
        tiny_qwen_image,
        trainer={"world_size": 2, "compile": True, "deterministic": False},
        timeouts={"hang_s": HANG_S},
    )
    requests = [Drawer(spec).draw(blobs, 0)]
    trainer: Trainer = launch(Trainer, spec, tmp_path, module="tests.services.trainer.slow_compile")
    trainer.configure()
    judge, silent, phases = HangJudge(HANG_S), 0.0, set()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(trainer.train, requests[0])
        while not step.done():
            before, told = time.monotonic(), heard(trainer)
            silent += 0.0 if told else time.monotonic() - before
            phases |= {one.phase for one in told or ()}
            assert judge.look(time.monotonic(), told) is None
            time.sleep(LOOK_S)
        assert step.result().policy_version == 1
    assert silent > HANG_S  # else nothing was shown
    assert "compile" in phases

    ranks = psutil.Process(trainer.process.pid).children()
    (second,) = [rank for rank in ranks if rank.environ()["RANK"] == "1"]
    wait_until(lambda: {one.phase for one in heard(trainer) or ()} == {"idle"})
    os.kill(second.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    while not (reason := judge.look(time.monotonic(), heard(trainer))):
        assert time.monotonic() - stopped < 2 * HANG_S
        time.sleep(LOOK_S)
    assert "rank 1 (phase idle) gave no sign for" in reason
