"""Weights are read from safetensors alone: a pickle in their place is refused, and never run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowfleet.models.registry import adapter_for
from services.trainer.model.loading import CheckpointSource

PARTS = {
    "transformer": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "vae": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "text_encoder": ("model", "pytorch_model"),
}
"""Each with the names of its weights as safetensors and as a pickle."""


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self._folder,)


@pytest.fixture
def model(tiny_qwen_image: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_qwen_image, tmp_path / "model")


def to_pickle(model: Path, part: str, bomb: Path | None) -> None:
    """Puts a pickle of the same weights in place of the safetensors, or one that does harm."""
    safe, pickle = PARTS[part]
    file = model / part / f"{safe}.safetensors"
    content = load_file(file) if bomb is None else {"weight": Bomb(bomb)}
    torch.save(content, model / part / f"{pickle}.bin")
    file.unlink()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("harmful", [False, True])
def test_a_pickle_is_refused_and_not_run(model: Path, tmp_path: Path, part: str, harmful: bool) -> None:
    bomb = tmp_path / "ran"
    to_pickle(model, part, bomb if harmful else None)
    words = rf"{part} has its weights as a pickle \({PARTS[part][1]}\.bin\).*save_pretrained"
    with pytest.raises(ValueError, match=words):
        adapter_for(model).load(model, dtype=torch.float32)
    assert not bomb.exists()


def test_a_pickle_beside_safetensors_is_not_looked_at(model: Path, tmp_path: Path) -> None:
    for part, (_, pickle) in PARTS.items():
        torch.save({"weight": Bomb(tmp_path / "ran")}, model / part / f"{pickle}.bin")
    adapter_for(model).load(model, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


def test_the_trainer_refuses_it_in_the_same_words(model: Path, tmp_path: Path) -> None:
    to_pickle(model, "transformer", tmp_path / "ran")
    with pytest.raises(ValueError, match="transformer has its weights as a pickle"):
        CheckpointSource(model / "transformer")
    assert not (tmp_path / "ran").exists()
