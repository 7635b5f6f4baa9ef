"""A trainer that was stopped, replaced and woken again changes nothing: no checkpoint, no replica, no result."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.data.blobs import SyncBlobs
from flowfleet.proto import trainer_pb2
from services.trainer.checkpoints.checkpoints import Checkpoints
from services.trainer.checkpoints.fence import Fence, Replaced
from tests.services.trainer.processes import Launch, Replica, Trainer
from tests.services.trainer.steps import Drawer, make_spec


def test_each_trainer_has_a_larger_number_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Fence(tmp_path / "checkpoints"), Fence(tmp_path / "checkpoints")
    first.check()
    assert first.take() > 0
    first.check()
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    assert second.take() == first.attempt + 1
    second.check()
    with pytest.raises(Replaced):
        first.check()


@pytest.mark.parametrize(
    ("moment", "there"),
    [("check", False), ("rename", False), ("check", True), ("rename", True), ("rmtree", True)],
)
def test_one_that_sleeps_between_look_and_rename_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, there: bool
) -> None:
    """It sleeps after its look, or just before it moves or removes something, while another one takes over and writes
    the same step."""
    old, new = Checkpoints(tmp_path, "job", 2), Checkpoints(tmp_path, "job", 2)
    old.take_over()
    aside, path = tmp_path / f".step-00000002.{old.token}.partial", tmp_path / "step-00000002"
    for folder in (aside, path) if there else (aside,):
        folder.mkdir()
        (folder / "file").write_text("old")
    holder = {"check": old.fence, "rename": os, "rmtree": shutil}[moment]
    real, slept = getattr(holder, moment), list[Any]()

    def sleeps(*given: object, **more: bool) -> None:
        if moment == "check":
            real(*given)
        if not slept:
            slept.append(True)
            new.take_over()
            (path / "file").unlink(missing_ok=True)
            path.mkdir(exist_ok=True)
            (path / "file").write_text("new")
        if moment != "check":
            real(*given, **more)

    monkeypatch.setattr(holder, moment, sleeps)
    with pytest.raises(Replaced):
        old.fence.put(aside, path)
    assert slept
    assert (path / "file").read_text() == "new"
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.long
def test_a_woken_trainer_that_was_replaced_changes_nothing(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    trainers: list[Trainer] = [launch(Trainer, spec, tmp_path, name=name) for name in ("calm", "old", "new")]
    calm, old, new = trainers
    replica: Replica = launch(Replica, tmp_path, name="good")
    requests = [Drawer(spec).draw(blobs, step, policy_version=0) for step in range(3)]

    calm.configure("calm")
    for request in requests:
        calm.train(request)
    undisturbed = calm.publish(3).weights_digest

    old.configure()
    old.train(requests[0])
    old.save()
    old.publish(1, replica)
    old.train(requests[1])
    saving = threading.Thread(target=_fails, args=(old.save,))
    saving.start()
    while not list((tmp_path / "checkpoints").glob(".step-00000002*partial")):
        assert saving.is_alive(), "it was too quick to be stopped"
        time.sleep(0.0005)
    os.kill(old.process.pid, signal.SIGSTOP)

    resumed = new.configure().applied_steps
    for request in requests[resumed:]:
        new.train(request)
    new.publish(3, replica)
    new.save()
    before = _complete(tmp_path / "checkpoints")

    os.kill(old.process.pid, signal.SIGCONT)
    woken = old.stub.PublishWeights.future(_publish(2, replica), timeout=30)
    saving.join(30)
    assert not saving.is_alive()
    assert _refused(woken)
    assert old.process.wait(30) == 1
    assert _complete(tmp_path / "checkpoints") == before
    assert replica.status().policy_version == 3
    assert new.publish(3, replica).weights_digest == replica.status().weights_digest == undisturbed


def _complete(directory: Path) -> dict[Path, int]:
    """When each file of a whole checkpoint was last changed."""
    return {path: path.stat().st_mtime_ns for path in directory.glob("[!.]*/*")}


def _publish(version: int, replica: Replica) -> trainer_pb2.PublishWeightsRequest:
    request = trainer_pb2.PublishWeightsRequest(job_id="job-1", version=version)
    request.replicas.append(trainer_pb2.Replica(replica_id=replica.name, address=replica.address()))
    return request


def _refused(call: Any) -> bool:
    try:
        return not any(result.ok for result in call.result().results)
    except grpc.RpcError:
        return True


def _fails(save: object) -> None:
    with pytest.raises(grpc.RpcError):
        save()  # type: ignore[operator]
