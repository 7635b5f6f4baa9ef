"""What a trainer writes of a checkpoint that is one folder of files: the same tensors by the same names."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto.trainer_pb2 import ExportModelRequest
from services.trainer import export as exports
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker
from tests.tiny_models import make_tiny

SIZE = Size(32, 32)


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        own = load_file(file)
        assert not tensors.keys() & own.keys()
        tensors |= own
    return tensors


def velocity(folder: Path, adapter_folder: Path | None = None) -> Tensor:
    adapter = adapter_for(folder).load(folder, dtype=torch.float32)
    prompts, latents = adapter.encode(["a red sign"]), adapter.initial_latents([1], SIZE)
    if adapter_folder is not None:
        PeftModel.from_pretrained(adapter.transformer, adapter_folder)
    with torch.no_grad():
        return adapter.velocity(latents, torch.tensor(500.0), prompts, size=SIZE)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_an_export_is_the_checkpoint_with_the_trained_tensors(
    mode: str, files: SyncBlobs, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are written one by one again, tensors of other parts unchanged; loaded, it has the trained velocity."""
    monkeypatch.setattr(exports, "SHARD_BYTES", 2_000_000)
    base = make_tiny("hunyuan_image3", tmp_path / "base")
    spec = make_spec(
        base,
        rollout={"prompts_per_step": 2},
        trainer={"mode": mode, "lora": {"rank": 2, "alpha": 4.0}, "optimizer": {"lr": 1e-2}},
    )
    worker = make_worker(spec, ranks, files, tmp_path)
    worker.train(Drawer(spec).draw(files, 0))
    folder = tmp_path / "export"
    worker.export(ExportModelRequest(job_id=JOB, directory=str(folder)))
    engine = engine_of(worker)
    encoder = adapter_for(base).load(base, dtype=torch.float32, components=("text_encoder",))
    prompts = encoder.encode(["a red sign"])
    latents = engine.adapter.initial_latents([1], SIZE)
    with torch.no_grad():
        trained = engine.adapter.velocity(latents, torch.tensor(500.0), prompts, size=SIZE)
    loaded = velocity(folder) if mode == "full" else velocity(base, folder)
    torch.testing.assert_close(loaded, trained, rtol=0, atol=1e-5)
    assert (velocity(base) - trained).abs().max() > 1e-3
    if mode == "lora":
        assert not list(folder.glob("pytorch_lora_weights*"))
        return
    before, after = stored(base), stored(folder)
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    others = ("vae.", "model.wte.", "model.ln_f.", "lm_head.", "vision_model.")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert not {name for name in changed if name.startswith(others)}
    assert any(".experts." in name for name in changed)
    assert (folder / "generation_config.json").is_file()
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
