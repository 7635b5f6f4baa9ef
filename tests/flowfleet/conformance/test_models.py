"""`flowfleet check-model`: the families that are shipped pass, and each thing that a family may lack is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor
from typer.testing import CliRunner

from flowfleet.cli.main import app
from flowfleet.conformance import models
from flowfleet.conformance.models import check_model
from flowfleet.models.base import ModelAdapter
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.trainable import require_trainable
from tests.tiny_models import make_tiny
from tests.tiny_models.text import save_text_model

ALL = ["files", "classes", "rows", "ratio", "parity", "lora", "reload"]


def statuses(place: str | Path) -> dict[str, str]:
    return {result.name: str(result.status) for result in check_model(str(place))}


def test_a_shipped_family_passes_from_the_command_line(tiny_qwen_image: Path) -> None:
    done = CliRunner().invoke(app, ["check-model", str(tiny_qwen_image), "--json"])
    assert done.exit_code == 0, done.output
    assert [(found["name"], found["status"]) for found in json.loads(done.stdout)] == [(name, "pass") for name in ALL]


@pytest.mark.parametrize("kind", ["wan_two_experts", "bagel"])
def test_experts_videos_and_layouts_of_their_own_pass(kind: str, tmp_path: Path) -> None:
    found = statuses(make_tiny(kind, tmp_path / "model"))
    assert set(found.values()) <= {"pass", "skip"}
    assert found["lora"] == "pass"


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_model_that_writes_text_passes(kind: str, tmp_path: Path) -> None:
    found = statuses(save_text_model(tmp_path / "model", kind))
    assert found == dict.fromkeys(("files", "log-probs", "lora", "reload"), "pass")


def test_text_that_is_not_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one row that see each other, and an adapter of which a layer is not there."""
    model = save_text_model(tmp_path / "model")
    log_probs = SequenceAdapter.log_probs

    def joined(adapter: SequenceAdapter, sequences: Any, *, temperature: float) -> Tensor:
        found = log_probs(adapter, sequences, temperature=temperature)
        return found + 0.01 * (len(sequences) > 1)

    monkeypatch.setattr(SequenceAdapter, "log_probs", joined)
    assert statuses(model) == {"files": "pass", "log-probs": "fail", "lora": "pass", "reload": "fail"}
    monkeypatch.undo()
    adapted = models._adapted
    monkeypatch.setattr(models, "_adapted", lambda adapter: dict(list(adapted(adapter).items())[:-1]))
    assert statuses(model) == {"files": "pass", "log-probs": "pass", "lora": "fail", "reload": "fail"}


def test_a_class_is_checked_without_a_model() -> None:
    assert statuses("QwenImagePipeline") == {"Qwen-Image": "pass"}
    with pytest.raises(ValueError, match="is not a folder"):
        statuses("no-such-plugin")


def test_files_are_checked_first(tiny_qwen_image: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert statuses(model) == {"files": "fail"}
    done = CliRunner().invoke(app, ["check-model", str(model)])
    assert done.exit_code == 1
    assert "vae has no weights" in done.output


def wrong_velocity(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = QwenImageAdapter._predict
    monkeypatch.setattr(QwenImageAdapter, "_predict", lambda *args, **named: 1.01 * predict(*args, **named))


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = QwenImageAdapter._predict

    def mixed(*args: Any, **named: Any) -> Tensor:
        found: Tensor = predict(*args, **named)
        return found + found.flip(0)

    monkeypatch.setattr(QwenImageAdapter, "_predict", mixed)


def wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = QwenImageAdapter._predict
    monkeypatch.setattr(QwenImageAdapter, "_predict", lambda *args, **named: predict(*args, **named).detach())


def no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenImagePipeline, "save_lora_weights", classmethod(lambda cls, folder: None))


def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenImageTransformer2DModel, "_no_split_modules", [])


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "velocity": (wrong_velocity, {"parity", "reload"}),
    "rows": (wrong_rows, {"rows", "parity", "reload"}),
    "gradients": (wrong_gradients, {"ratio"}),
    "saving": (no_saving, {"classes", "reload"}),
    "blocks": (no_blocks, {"classes"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_family_fails_its_check(
    fault: str, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, failing = FAULTS[fault]
    spoil(monkeypatch)
    assert {name for name, status in statuses(tiny_qwen_image).items() if status == "fail"} == failing


def test_a_trainer_asks_for_the_classes_before_it_trains(tiny_qwen_image: Path) -> None:
    adapter: ModelAdapter = adapter_for(tiny_qwen_image).load(
        tiny_qwen_image, dtype=torch.float32, components=("transformer",), load_format="empty"
    )

    class Bare(torch.nn.Module):
        _no_split_modules = ("Linear",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

    class Pipeline:
        @classmethod
        def save_lora_weights(cls, folder: str) -> None: ...

    require_trainable(adapter.experts, adapter.pipeline_class, lora=True)
    require_trainable({"transformer": Bare()}, lora=False)
    with pytest.raises(ValueError, match=r"Bare takes no adapter: derive it from diffusers\.loaders\.PeftAdapterMixin"):
        require_trainable({"transformer": Bare()}, lora=True)
    with pytest.raises(ValueError, match=r"Pipeline\.save_lora_weights takes no transformer_lora_layers"):
        require_trainable(adapter.experts, Pipeline, lora=True)
    require_trainable(adapter.experts, object, lora=True)  # another pipeline's writes its adapter
    with pytest.raises(ValueError, match="set its class attribute _no_split_modules"):
        require_trainable({"transformer": torch.nn.Linear(2, 2)}, lora=False)
