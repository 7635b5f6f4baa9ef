"""What a trainer of sequences writes: transformers and PEFT load it; a checkpoint continues bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.proto.trainer_pb2 import ExportModelRequest, SaveCheckpointRequest
from flowfleet.weights import lora
from services.trainer import export as exports
from services.trainer.model.engine import lora_spec
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.sequences import Writer, make_spec
from tests.services.trainer.steps import JOB
from tests.services.trainer.workers import make_worker, state_of, trained_of
from tests.tiny_models.text import save_text_model

IDS = torch.tensor([[3, 5, 7, 11, 13, 17]])


def small(folder: Path, **trainer: Any) -> JobSpec:
    spec = make_spec(folder, trainer={**trainer, "threads": 1, "lora": {"rank": 2, "alpha": 4.0}})
    data = spec.model_dump(mode="json")
    data["rollout"] |= {"prompts_per_step": 2, "group_size": 2}
    return JobSpec.model_validate(data)


@pytest.mark.parametrize(
    ("kind", "mode"), [("dense", "full"), ("experts", "full"), ("tied", "lora"), ("experts", "lora")]
)
def test_an_export_is_loaded_by_transformers_and_peft(
    kind: str, mode: str, files: SyncBlobs, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "SHARD_BYTES", 20_000)
    base = save_text_model(tmp_path / "base", kind)
    spec = small(base, mode=mode)
    worker = make_worker(spec, ranks, files, tmp_path)
    worker.train(Writer(spec).write(files, 0))
    folder = tmp_path / "export"
    worker.export(ExportModelRequest(job_id=JOB, directory=str(folder)))
    state = state_of(worker)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if mode == "lora":
        loaded: Any = PeftModel.from_pretrained(plain, folder)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, state[f"model.{name}"]), name
    expected = expected_model(base)
    if mode == "lora":
        lora.install_lora({"model": expected}, lora_spec(spec))
        lora.load_adapter({"model": expected}, state)
    else:
        expected.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
        if mode == "lora":
            bare = expected_model(base)
            assert not torch.allclose(bare(IDS).logits, expected(IDS).logits, atol=1e-4), "the adapter was trained"
    assert "from transformers import Qwen3" in (folder / "README.md").read_text()


def expected_model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def test_an_adapter_is_taken_out_again(tmp_path: Path) -> None:
    model = expected_model(save_text_model(tmp_path / "base"))
    with torch.no_grad():
        before = model(IDS).logits
    spec = small(tmp_path / "base")
    for _ in range(2):
        parameters = lora.install_lora({"model": model}, lora_spec(spec))
        for parameter in parameters.values():
            parameter.data.normal_()
        with torch.no_grad():
            assert not torch.allclose(model(IDS).logits, before, atol=1e-3)
        lora.remove_lora({"model": model})
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_resumed_trainer_goes_on_with_the_same_bits(
    mode: str, files: SyncBlobs, ranks: Ranks, tmp_path: Path
) -> None:
    spec = small(save_text_model(tmp_path / "base"), mode=mode)
    requests = [Writer(spec).write(files, step) for step in range(2)]
    worker = make_worker(spec, ranks, files, tmp_path)
    worker.train(requests[0])
    worker.save(SaveCheckpointRequest(job_id=JOB))
    worker.train(requests[1])
    again = make_worker(spec, ranks, files, tmp_path)
    again.train(requests[1])
    for name, tensor in trained_of(worker).items():
        assert torch.equal(trained_of(again)[name], tensor), name
