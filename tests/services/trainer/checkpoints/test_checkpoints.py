"""Leftovers of trainers: each has its own names, and abandoned ones are deleted."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.lineage import extend, misfit
from flowfleet.errors import Conflict, DataLoss
from flowfleet.proto import trainer_pb2
from services.trainer.checkpoints.checkpoints import STALE_S, Checkpoints
from services.trainer.checkpoints.set_aside import kept_aside
from services.trainer.checkpoints.state import FORMAT, write_state
from services.trainer.parallel.ranks import Ranks
from services.trainer.record import Record
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import make_worker


def request(step: int, advantage: float = 1.0) -> trainer_pb2.TrainStepRequest:
    return trainer_pb2.TrainStepRequest(job_id="job", step=step, samples=[trainer_pb2.TrainSample(advantage=advantage)])


def record(version: int, advantage: float = 1.0) -> Record:
    made = Record()
    for step in range(version):
        made.add(request(step, advantage), {"actor/loss": float(step)})
    return made


def write(directory: Path, *versions: int, advantage: float = 1.0) -> Checkpoints:
    """Checkpoints without tensors."""
    for version in versions:
        path = directory / f"step-{version:08d}"
        path.mkdir()
        state = {
            "format": FORMAT,
            "job_id": "job",
            "files": {},
            "digests": {},
            "record": record(version, advantage).to_json(),
        }
        write_state(path, state)
    return Checkpoints(directory, "job", 3)


def going_with(version: int) -> Callable[[Record], str]:
    """A ledger that knows the lineage of its version."""
    ledger = trainer_pb2.LedgerPosition(version=version, latest=version, history=record(version).history)
    return lambda found: misfit(found.version, found.history, ledger)


def names(directory: Path) -> list[str]:
    return sorted(re.sub("aside-.*", "aside", path.name) for path in directory.iterdir())


def test_the_newest_at_or_below_the_ledger_is_loaded_and_newer_ones_are_set_aside(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 2, 4, 6, 8)
    assert checkpoints.choose(going_with(8)) == tmp_path / "step-00000008"
    assert checkpoints.choose(going_with(5)) == tmp_path / "step-00000004"
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006.aside", "step-00000008.aside"]
    reasons = [one.reason for one in kept_aside(tmp_path)]
    assert all("ahead of the ledger, which is at version 5" in reason for reason in reasons)
    assert checkpoints.choose(going_with(8)) == tmp_path / "step-00000004"


def test_a_checkpoint_of_another_history_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, 2)
    checkpoints = write(tmp_path, 4, advantage=9.0)
    assert checkpoints.choose(going_with(5)) == tmp_path / "step-00000002"
    assert names(tmp_path) == ["step-00000002", "step-00000004.aside"]


def test_with_none_that_will_do_nothing_is_renamed_and_words_are_said(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 7, 8)
    with pytest.raises(DataLoss, match="step-00000008: version 8 is ahead of the ledger, which is at version 5"):
        checkpoints.choose(going_with(5), from_start=False)
    assert names(tmp_path) == ["step-00000007", "step-00000008"]


def test_a_job_begins_at_step_0_while_all_its_requests_are_stored(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 8)
    assert checkpoints.choose(going_with(5)) is None
    assert names(tmp_path) == ["step-00000008.aside"]


def test_a_replayed_step_is_answered_only_for_the_request_that_was_applied() -> None:
    kept = Record.from_json(json.loads(json.dumps(record(3).to_json())))
    kept.check_replay(request(1))
    with pytest.raises(Conflict, match="another request"):
        kept.check_replay(request(1, advantage=2.0))
    Record(version=3).check_replay(request(1))  # from a checkpoint that is older than lineages


def test_two_trainers_of_a_job_write_aside_under_other_names(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "job", 1).token != Checkpoints(tmp_path, "job", 1).token


def test_only_what_another_may_still_finish_is_left_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "job", 1, token="ours")
    kept = [".step-00000012.theirs.partial", "step-00000008", "notes"]
    gone = [
        ".step-00000008.partial",
        ".step-00000007.theirs.partial",
        ".step-00000013.ours.partial",
        ".step-00000014.old.partial",
    ]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    long_ago = time.time() - 2 * STALE_S
    for path in (tmp_path / gone[-1] / "file", tmp_path / gone[-1]):
        os.utime(path, (long_ago, long_ago))
    checkpoints._clean(8)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_configured_trainer_says_whether_its_weights_go_with_the_ledger(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Ahead of the ledger it is replaced; its successor takes the newest checkpoint that goes with it."""
    spec = make_spec(tiny_qwen_image)
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    history: dict[int, str] = {}
    for step in range(3):
        drawn = drawer.draw(files, step)
        worker.train(drawn)
        extend(history, drawn)
        worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))

    def configure(asked: Worker, version: int, **known: str) -> trainer_pb2.ConfigureResponse:
        position = trainer_pb2.LedgerPosition(version=version, latest=version)
        position.history.update({int(name.removeprefix("v")): lineage for name, lineage in known.items()})
        directory = str(tmp_path / "checkpoints")
        text = spec.model_dump_json()
        return asked.configure(
            trainer_pb2.ConfigureRequest(job_id=JOB, spec_json=text, directory=directory, ledger=position)
        )

    assert configure(worker, 3, v3=history[3]).misfit == ""
    assert configure(worker, 4, v3=history[3]).misfit == ""
    assert "ahead of the ledger, which is at version 2" in configure(worker, 2).misfit
    assert "from other steps" in configure(worker, 3, v3="another").misfit
    successor = configure(Worker(ranks, files), 2, v2=history[2])
    assert (successor.applied_steps, successor.misfit) == (2, "")
    assert [(one.step, "ahead" in one.reason) for one in successor.set_aside] == [(3, True)]
