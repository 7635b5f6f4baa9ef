"""A trainer of two ranks under the controller's judgment: a long compilation is let be, a rank that stands still is
named in time."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from flowfleet.data.blobs import SyncBlobs
from flowfleet.proto import trainer_pb2
from services.controller.job.trainer.hangs import HangJudge, Progress
from services.controller.job.trainer.watch import ANSWER_S, LOOK_S
from services.trainer.beats import Beats
from tests.services.trainer.processes import Launch, Trainer
from tests.services.trainer.steps import Drawer, make_spec
from tests.waiting import wait_until

HANG_S = 5.0


def heard(trainer: Trainer) -> list[Progress] | None:
    try:
        status = trainer.stub.GetStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=ANSWER_S)
    except grpc.RpcError:
        return None
    return [Progress(one.rank, one.phase, one.limit_s, one.count, one.signs) for one in status.ranks]


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
