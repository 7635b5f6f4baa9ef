"""The model that every checkpoint holds: loaded by diffusers and PEFT, readable by others, covered by the digests."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from peft import PeftModel
from safetensors import SafetensorError

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import Full, InvalidRequest
from flowfleet.hub import HubName, origin_of
from flowfleet.job.model_files import MANIFEST, model_folder, read_manifest
from flowfleet.job.spec import JobSpec
from flowfleet.models.loading import DTYPE_KEYWORD
from flowfleet.proto import trainer_pb2
from services.trainer import export
from services.trainer.checkpoints.set_aside import kept_aside
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local
from services.trainer.worker import Worker
from tests.services.trainer import damage
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, state_of, trained_of

CARD = "## Training\n\nA curve."


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def save(worker: Worker, **parts: Any) -> Path:
    return Path(worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB, card=CARD, **parts)).path)


def trained(spec: JobSpec, ranks: Ranks, files: SyncBlobs, folder: Path) -> Worker:
    """After one step."""
    worker = make_worker(spec, ranks, files, folder)
    worker.train(Drawer(spec).draw(files, 0))
    return worker


def test_diffusers_and_peft_load_what_a_checkpoint_holds(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = trained(make_spec(tiny_qwen_image), ranks, files, tmp_path)
    folder = save(worker) / "model"
    expected = {name.removeprefix("transformer."): tensor for name, tensor in state_of(worker).items()}
    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    pipeline.load_lora_weights(folder)
    by_diffusers = {
        name.replace(".default_0", ""): tensor
        for name, tensor in pipeline.transformer.state_dict().items()
        if ".lora_" in name
    }
    pipeline.unload_lora_weights()
    peft: Any = PeftModel.from_pretrained(pipeline.transformer, str(folder))
    by_peft = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor
        for name, tensor in peft.state_dict().items()
        if ".lora_" in name
    }
    for loaded in (by_diffusers, by_peft):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert peft.peft_config["default"].lora_alpha == 6
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", 3, str(tiny_qwen_image))


def test_its_files_have_digests_and_the_mode_of_the_umask(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    folder = save(trained(make_spec(tiny_qwen_image), ranks, files, tmp_path)) / "model"
    manifest = read_manifest(folder)
    assert (manifest.job_id, manifest.step, manifest.kind, manifest.weights) == (JOB, 1, "adapter", "trained")
    here = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert here == {*manifest.files, MANIFEST}
    for name, file in manifest.files.items():
        data = (folder / name).read_bytes()
        assert (file.size_bytes, file.crc32) == (len(data), f"{zlib.crc32(data):08x}")
    assert {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()} == {"0o640"}
    assert oct(folder.stat().st_mode & 0o777) == "0o750"
    card = (folder / "README.md").read_text()
    assert "It holds the trained weights, after 1 training steps" in card
    assert f'pipe = QwenImagePipeline.from_pretrained("{tiny_qwen_image}", {DTYPE_KEYWORD}=torch.float32)' in card
    assert "pipe.load_lora_weights(folder)" in card
    assert card.rstrip().endswith("A curve.")


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ("average", {"trainer": {"ema": {"decay": 0.5}}}),
        ("old policy", {"algorithm": {"name": "diffusion_nft"}, "trainer": {"ema": {"decay": None}}}),
    ],
)
def test_it_says_which_weights_it_holds(
    weights: str, parts: dict[str, Any], tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    folder = save(make_worker(make_spec(tiny_qwen_image, **parts), ranks, files, tmp_path)) / "model"
    assert read_manifest(folder).weights == weights
    assert {"average": "the moving average", "old policy": "the old policy"}[weights] in (
        folder / "README.md"
    ).read_text()


def test_a_damaged_model_is_a_damaged_checkpoint(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    worker = make_worker(spec, ranks, files, tmp_path)
    save(worker)
    worker.train(Drawer(spec).draw(files, 0))
    adapter = save(worker) / "model" / "adapter_model.safetensors"
    damage.flip(adapter, adapter.stat().st_size - 5)
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert resumed.job is not None
    assert resumed.job.record.version == 0
    (aside,) = kept_aside(tmp_path / "checkpoints")
    assert "model/adapter_model.safetensors has the digest" in aside.reason


def test_a_job_of_full_weights_exports_a_pipeline_by_a_setting(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    mode = {"mode": "full"}
    plain = make_worker(make_spec(tiny_qwen_image, trainer=mode), ranks, files, tmp_path / "plain")
    assert not (save(plain) / "model").exists()
    spec = make_spec(tiny_qwen_image, trainer=mode, schedule={"save_full": True})
    worker = trained(spec, ranks, files, tmp_path)
    folder = save(worker) / "model"
    assert read_manifest(folder).kind == "pipeline"
    loaded = QwenImagePipeline.from_pretrained(folder).transformer.state_dict()
    expected = {name.removeprefix("transformer."): tensor for name, tensor in state_of(worker).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert all(torch.equal(trained_of(resumed)[name], tensor) for name, tensor in trained_of(worker).items())


def test_the_best_stay_beside_the_newest(tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> None:
    spec = make_spec(tiny_qwen_image, schedule={"keep_last": 1})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    for step in range(3):
        save(worker, keep=[1])
        worker.train(drawer.draw(files, step))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000001", "step-00000002"]
    newest = tmp_path / "checkpoints" / "step-00000002" / "model"
    assert model_folder(tmp_path) == newest
    assert model_folder(tmp_path, 1) == newest.parents[1] / "step-00000001" / "model"
    assert model_folder(tmp_path, 0) is None
    worker.export(trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(tmp_path / "model"), card=CARD))
    assert model_folder(tmp_path) == tmp_path / "model"
    assert read_manifest(tmp_path / "model").step == 3


def test_a_disk_that_fills_while_the_model_is_written_is_said(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of safetensors, which has an error of its own for what the system says."""

    def refuse(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    worker = make_worker(make_spec(tiny_qwen_image), ranks, files, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(export, "save_file", refuse)
        with pytest.raises(Full, match="no space for a checkpoint"):
            save(worker)
    assert not list((tmp_path / "checkpoints").glob("*step-*"))
    assert save(worker).is_dir()


def test_a_name_on_a_hub_is_found_in_the_cache_of_its_client() -> None:
    commit = "0f" * 20
    assert origin_of(f"/x/hub/models--Qwen--Qwen-Image/snapshots/{commit}") == HubName("Qwen/Qwen-Image", commit)
    assert origin_of(f"Qwen/Qwen-Image@{commit}") == HubName("Qwen/Qwen-Image", commit)
    assert origin_of("/models/tiny") is origin_of("./a/b") is origin_of("a/b/c") is None


def test_the_file_of_diffusers_is_read_as_such_beside_that_of_peft(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = trained(make_spec(tiny_qwen_image), ranks, files, tmp_path)
    folder = Path(shutil.copytree(save(worker) / "model", tmp_path / "copy"))
    for start in (folder / "pytorch_lora_weights.safetensors", folder / "adapter_model.safetensors"):
        spec = make_spec(tiny_qwen_image, model={"adapter": str(start)})
        started = trained_of(make_worker(spec, ranks, files, tmp_path / start.stem))
        assert all(torch.equal(started[name], tensor) for name, tensor in trained_of(worker).items())


# Resumed as another job -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_another_job_goes_on_from_a_checkpoint_with_all_that_it_holds(
    mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Weights, moments, old policy and average; its own steps begin at 0, and then its own checkpoints count."""
    parts: dict[str, Any] = {"algorithm": {"name": "diffusion_nft"}, "trainer": {"mode": mode, "ema": {"decay": 0.5}}}
    first = trained(make_spec(tiny_qwen_image, **parts), ranks, files, tmp_path / "first")
    origin = save(first)
    parts["trainer"]["resume"] = str(origin)
    spec = make_spec(tiny_qwen_image, **parts)
    second = make_worker(spec, ranks, files, tmp_path / "second")
    assert second.job is not None
    assert second.job.record.version == 0
    here, there = (held_by(worker) for worker in (first, second))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert engine_of(second).policies.num_updates == engine_of(first).policies.num_updates
    second.train(Drawer(spec).draw(files, 0))
    save(second)
    shutil.rmtree(origin)
    third = make_worker(spec, ranks, files, tmp_path / "second")
    assert third.job is not None
    assert third.job.record.version == 1
    assert all(torch.equal(trained_of(third)[name], tensor) for name, tensor in trained_of(second).items())


def held_by(worker: Worker) -> dict[str, torch.Tensor]:
    engine = engine_of(worker)
    held = engine.optimizer.moments() | engine.policies.state()
    return trained_of(worker) | {name: local(tensor).clone() for name, tensor in held.items()}


def test_what_cannot_be_resumed_fails_with_words_and_stays(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    origin = save(trained(make_spec(tiny_qwen_image), ranks, files, tmp_path / "first"))

    def resume(path: Path, **trainer: Any) -> None:
        spec = make_spec(tiny_qwen_image, trainer={"resume": str(path), **trainer})
        make_worker(spec, ranks, files, tmp_path / "second")

    with pytest.raises(InvalidRequest, match=r"trainer.resume: .* is no checkpoint with this model and adapter"):
        resume(origin, lora={"rank": 2})
    with pytest.raises(InvalidRequest, match=r"trainer.resume: step-00000001 cannot be loaded"):
        resume(origin, ema={"decay": 0.5})
    damage.flip_tensor(origin, "trained.")
    with pytest.raises(InvalidRequest, match=r"trainer.resume: step-00000001 is damaged"):
        resume(origin)
    assert origin.is_dir()
    with pytest.raises(InvalidRequest, match=r"trainer.resume: step-00000009 is damaged: state.json: No such file"):
        resume(origin.with_name("step-00000009"))
