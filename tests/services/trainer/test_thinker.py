"""A Thinker of Qwen3-Omni as the trainer reads and writes it: by itself, and inside a whole model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.sequences.stored_names import stored
from flowfleet.models.trainable import blocks_of
from recipes.tiny_thinker import model as tiny
from services.trainer.model.kinds import TransformersSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinker")
    tiny.save_random(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a whole Qwen3-Omni stores them, without its talker."""
    path = tmp_path_factory.mktemp("whole")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"thinker.{name}": value for name, value in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    written = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": config,
    }
    (path / "config.json").write_text(json.dumps(written))
    return path


@pytest.fixture(scope="module")
def adapter(folder: Path) -> SequenceAdapter:
    return sequence_adapter_for(folder).load(folder, dtype=torch.float32, components=("transformer",))


@pytest.mark.parametrize("place", ["folder", "whole"])
def test_every_row_is_read_from_the_files(adapter: SequenceAdapter, place: str, request: pytest.FixtureRequest) -> None:
    source = TransformersSource(request.getfixturevalue(place), adapter.layout)
    source.check(adapter.transformer)
    for name, parameter in adapter.transformer.named_parameters():
        rows = slice(0, len(parameter) // 2 + 1)
        assert torch.equal(source.rows(name, parameter.shape, rows), parameter[rows]), name


def test_a_whole_model_is_loaded_as_its_thinker(adapter: SequenceAdapter, whole: Path) -> None:
    found = sequence_adapter_for(whole).load(whole, dtype=torch.float32, components=("transformer",))
    pairs = zip(found.transformer.named_parameters(), adapter.transformer.named_parameters(), strict=True)
    for (name, own), (_, expected) in pairs:
        assert torch.equal(own, expected), name


def test_what_is_written_is_what_transformers_wrote(adapter: SequenceAdapter, folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    found = {key: value for name, one in adapter.transformer.named_parameters() for key, value in stored(name, one)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_blocks_are_layers_and_never_whole_encoders(adapter: SequenceAdapter) -> None:
    kinds = [type(block).__name__ for block in blocks_of(adapter.transformer)]
    assert sorted(set(kinds)) == [
        "Qwen3OmniMoeAudioEncoderLayer",
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeVisionBlock",
    ]
    assert len(kinds) == 5
