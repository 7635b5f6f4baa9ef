"""Damaged checkpoints: noticed while they are loaded, set aside, and the next older one is loaded bit for bit."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flowfleet.data.blobs import FsspecBlobs, SyncBlobs
from flowfleet.errors import DataLoss, OtherFormat
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from services.trainer.checkpoints import files as checkpoint_files
from services.trainer.checkpoints.set_aside import KEPT, kept_aside, set_aside
from services.trainer.checkpoints.state import FORMAT, read_state, write_state
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer import damage
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import make_worker, trained_of

Trained = dict[str, torch.Tensor]
KINDS: dict[str, Callable[[Path], None]] = {
    "trained": partial(damage.flip_tensor, prefix="trained."),
    "first moment": partial(damage.flip_tensor, prefix="exp_avg."),
    "second moment": partial(damage.flip_tensor, prefix="exp_avg_sq."),
    "generators": partial(damage.flip_tensor, prefix="rng."),
    "state": damage.flip_state,
    "header": damage.zero_header,
    "truncated": damage.truncate,
    "missing": damage.lose_file,
    "no state": damage.lose_state,
}


@pytest.fixture(scope="module")
def job(
    tiny_qwen_image: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobSpec, Path, dict[int, Trained]]:
    """Its folder with the checkpoints of steps 1 and 2, and what was trained after 0, 1 and 2 steps."""
    folder = tmp_path_factory.mktemp("job")
    spec = make_spec(tiny_qwen_image, schedule={"keep_last": 2})
    blobs = FsspecBlobs(f"file://{folder}/blobs")
    worker, drawer = make_worker(spec, ranks, blobs, folder), Drawer(spec)
    trained = {0: trained_of(worker)}
    for step in range(2):
        worker.train(drawer.draw(blobs, step))
        worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
        trained[step + 1] = trained_of(worker)
    return spec, folder, trained


@pytest.fixture
def checkpoints(job: tuple[JobSpec, Path, dict[int, Trained]], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(job[1] / "checkpoints", tmp_path / "checkpoints"))


def resumed(spec: JobSpec, ranks: Ranks, files: SyncBlobs, folder: Path) -> tuple[Worker, Any]:
    """A new trainer, and what it says of how it was configured."""
    worker = make_worker(spec, ranks, files, folder)
    request = trainer_pb2.ConfigureRequest(
        job_id=JOB, spec_json=spec.model_dump_json(), directory=str(folder / "checkpoints")
    )
    return worker, worker.configure(request)


def is_at(worker: Worker, trained: Trained) -> bool:
    mine = trained_of(worker)
    return mine.keys() == trained.keys() and all(torch.equal(mine[name], trained[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_set_aside_and_the_older_one_is_loaded(
    kind: str,
    job: tuple[JobSpec, Path, dict[int, Trained]],
    checkpoints: Path,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
) -> None:
    spec, _, trained = job
    KINDS[kind](checkpoints / "step-00000002")
    worker, told = resumed(spec, ranks, files, tmp_path)
    assert (told.applied_steps, Path(told.resumed_from).name) == (1, "step-00000001")
    assert is_at(worker, trained[1])
    (aside,) = told.set_aside
    assert aside.step == 2
    assert Path(aside.path).name.startswith("step-00000002.aside-")
    assert "step-00000002 is damaged" in aside.reason
    assert not (checkpoints / "step-00000002").exists()
    assert worker.train(Drawer(spec).draw(files, 1)).policy_version == 2
    saved = worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    assert Path(saved.path).name == "step-00000002"


def test_all_lost_begins_anew(
    job: tuple[JobSpec, Path, dict[int, Trained]], checkpoints: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec, _, trained = job
    damage.flip_tensor(checkpoints / "step-00000002", "trained.")
    damage.zero_header(checkpoints / "step-00000001")
    worker, told = resumed(spec, ranks, files, tmp_path)
    assert (told.applied_steps, told.resumed_from, told.samples) == (0, "", 0)
    assert is_at(worker, trained[0])
    assert [aside.step for aside in told.set_aside] == [2, 1]


def test_checkpoints_from_before_there_were_digests_are_loaded_and_judged_by_what_reads_them(
    job: tuple[JobSpec, Path, dict[int, Trained]], checkpoints: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec, _, trained = job
    for checkpoint in checkpoints.glob("step-*"):
        damage.without_digests(checkpoint)
    worker, told = resumed(spec, ranks, files, tmp_path)
    assert (told.applied_steps, len(told.set_aside)) == (2, 0)
    assert is_at(worker, trained[2])
    damage.zero_header(checkpoints / "step-00000002")
    assert resumed(spec, ranks, files, tmp_path)[1].applied_steps == 1


def test_another_format_is_refused_with_words_and_stays(
    job: tuple[JobSpec, Path, dict[int, Trained]], checkpoints: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    newest = checkpoints / "step-00000002"
    write_state(newest, {**read_state(newest), "format": "flowfleet.trainer.v9"})
    with pytest.raises(OtherFormat, match=rf"v9, but this trainer reads {FORMAT}: run the version of Flowfleet that"):
        make_worker(job[0], ranks, files, tmp_path)
    assert newest.is_dir()
    assert not kept_aside(checkpoints)


def test_only_the_newest_that_were_set_aside_stay(tmp_path: Path) -> None:
    for step in range(KEPT + 2):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        set_aside(folder, f"reason {step}")
    kept = kept_aside(tmp_path)
    assert [(one.step, one.reason) for one in kept] == [(step, f"reason {step}") for step in range(2, KEPT + 2)]


# Any byte of a small state -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with all dtypes that checkpoints have, and its tensors."""
    folder = tmp_path_factory.mktemp("small") / "step-00000001"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "trained.a": torch.randn(3, 5, generator=generator),
        "exp_avg_codes.a": torch.randint(0, 256, (3, 5), dtype=torch.uint8, generator=generator),
        "old.b": torch.randn(7, generator=generator).bfloat16(),
        "rng.0.cpu": torch.randint(0, 256, (11,), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }
    digests = checkpoint_files.write(tensors, folder, ranks)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    write_state(folder, {"format": FORMAT, "files": files, "digests": digests, "record": {"applied": 1}})
    return folder, tensors


def read(folder: Path, like: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    checkpoint_files.read_verified(tensors, folder, read_state(folder), ranks)
    return tensors


def test_what_is_written_is_read_by_safetensors_and_bit_for_bit(
    small: tuple[Path, dict[str, torch.Tensor]], ranks: Ranks
) -> None:
    folder, tensors = small
    for found in (read(folder, tensors, ranks), load_file(damage.shard(folder))):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), in_state=st.booleans())
def test_any_flipped_byte_is_harmless_or_noticed(
    place: float,
    mask: int,
    in_state: bool,
    small: tuple[Path, dict[str, torch.Tensor]],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    folder, tensors = small
    shutil.rmtree(copy := tmp_path / folder.name, ignore_errors=True)
    shutil.copytree(folder, copy)
    file = copy / "state.json" if in_state else damage.shard(copy)
    damage.flip(file, int(place * file.stat().st_size), mask)
    try:
        found = read(copy, tensors, ranks)
    except DataLoss:
        return
    assert in_state, "every byte of a file counts"
    assert json.loads(file.read_text()) == json.loads((folder / "state.json").read_text())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


# Two ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_damage_of_one_ranks_file_alone_is_damage_for_all(tiny_qwen_image: Path, tmp_path: Path) -> None:
    spec = make_spec(tiny_qwen_image, schedule={"keep_last": 2}, trainer={"world_size": 2})
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    prepare(first, spec, [Drawer(spec).draw(blobs_of(first), 0)])
    torchrun(first)
    for folder in (second, third):
        prepare(folder, spec, [])
        shutil.copytree(first / "checkpoints", folder / "checkpoints")
    checkpoint = second / "checkpoints" / "step-00000001"
    assert len(list(checkpoint.glob("*.safetensors"))) == 2
    damage.flip_tensor(checkpoint, "exp_avg.", rank=1)
    torchrun(second, third)
    (aside,) = kept_aside(second / "checkpoints")
    assert "shard-00002.safetensors has the digest" in aside.reason
    assert read_state(second / "checkpoints" / "step-00000000")["record"]["applied"] == 0
    assert read_state(third / "checkpoints" / "step-00000001")["record"]["applied"] == 1
    assert not kept_aside(third / "checkpoints")
