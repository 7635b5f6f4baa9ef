"""A disk without room for a checkpoint: reported before anything is written; nothing is left behind, and the job
continues."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import Full
from flowfleet.proto import trainer_pb2
from services.trainer.checkpoints import fence
from services.trainer.checkpoints import files as checkpoint_files
from services.trainer.checkpoints.checkpoints import Checkpoints
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.steps import JOB, make_spec
from tests.services.trainer.workers import make_worker

SAVE = trainer_pb2.SaveCheckpointRequest(job_id=JOB)
ENOUGH = 2**30


@pytest.fixture
def worker(tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> Worker:
    return make_worker(make_spec(tiny_qwen_image), ranks, files, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Makes a disk of 17 MiB; a checkpoint needs 16 MiB and its 120 kB."""
    disk = tmp_path / "checkpoints"
    disk.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root, who may mount a file system: run the tests as root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != fence.NAME)


def test_room_is_looked_at_first_and_asked_for_in_bytes(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"bytes": 1000}
    monkeypatch.setattr(Checkpoints, "_free", lambda self: free["bytes"])
    with pytest.raises(Full, match=r"checkpoints has 1,000 bytes free of the 1\d,\d{3},\d{3} that it needs"):
        worker.save(SAVE)
    assert left_in(tmp_path / "checkpoints") == []
    free["bytes"] = ENOUGH
    assert Path(worker.save(SAVE).path).name == "step-00000000"


def test_a_disk_that_fills_while_it_is_written_leaves_nothing(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's ENOSPC, which /dev/full gives to everybody."""
    write = checkpoint_files._write_file
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "_write_file", lambda path, *rest: write(Path("/dev/full"), *rest))
        with pytest.raises(Full, match=r"no space for a checkpoint: .*bytes free of the"):
            worker.save(SAVE)
    assert left_in(tmp_path / "checkpoints") == []
    assert Path(worker.save(SAVE).path).is_dir()


def test_a_small_disk_is_waited_for(small_disk: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    filling = small_disk / "filling"
    filling.write_bytes(bytes(2**20))
    with pytest.raises(Full, match="Free some: the job then continues by itself"):
        worker.save(SAVE)
    filling.write_bytes(bytes(shutil.disk_usage(small_disk).free + filling.stat().st_size - 2**16))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_free", lambda self: ENOUGH)  # it fills after the look
        with pytest.raises(Full):
            worker.save(SAVE)
    assert left_in(small_disk) == ["filling"]
    filling.unlink()
    assert Path(worker.save(SAVE).path).is_dir()
    assert left_in(small_disk) == ["step-00000000"]


def test_what_was_set_aside_makes_room_first(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = tmp_path / "checkpoints" / "step-00000009.aside-1"
    aside.mkdir(parents=True)
    monkeypatch.setattr(Checkpoints, "_free", lambda self: 0 if aside.exists() else ENOUGH)
    assert Path(worker.save(SAVE).path).is_dir()
    assert not aside.exists()
