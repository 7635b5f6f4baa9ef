"""Weights into shards: each rank its own rows, and clear words about what is not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowfleet.models.registry import adapter_for
from services.trainer.model.loading import CheckpointSource

FILE = "diffusion_pytorch_model.safetensors"


def test_every_rank_reads_its_own_rows_and_no_more(tiny_qwen_image: Path) -> None:
    command = [sys.executable, "-m", "tests.services.trainer.reading", str(tiny_qwen_image)]
    ranks = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert all(rank["holds_its_rows"] and rank["dummies_too"] for rank in ranks)
    assert all(rank["read"] == rank["shards"] for rank in ranks)
    assert sum(rank["read"] for rank in ranks) == ranks[0]["model"]
    assert max(rank["read"] for rank in ranks) < 0.4 * ranks[0]["model"]


def empty(path: Path) -> torch.nn.Module:
    family = adapter_for(path)
    module: torch.nn.Module = family.load(
        path, dtype=torch.float32, components=("transformer",), load_format="empty"
    ).transformer
    return module


def test_what_a_checkpoint_lacks_is_named(tiny_qwen_image: Path, tmp_path: Path) -> None:
    expert, state = empty(tiny_qwen_image), load_file(tiny_qwen_image / "transformer" / FILE)
    with pytest.raises(ValueError, match=f"{FILE} is not there"):
        CheckpointSource(tmp_path)
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(ValueError, match="is not a whole file"):
        CheckpointSource(tmp_path)
    save_file({name: tensor for name, tensor in state.items() if name != "img_in.weight"}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"no weights for 1 of \d+ tensors, the first is img_in.weight"):
        CheckpointSource(tmp_path).check(expert)
    save_file(state | {"img_in.weight": torch.zeros(2, 3)}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"img_in.weight .* has shape \[?\(2, 3\), its configuration says"):
        CheckpointSource(tmp_path).check(expert)


def test_several_files_are_one_checkpoint(tiny_qwen_image: Path, tmp_path: Path) -> None:
    expert, state = empty(tiny_qwen_image), load_file(tiny_qwen_image / "transformer" / FILE)
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in state.items() if places[name] == file}, tmp_path / file)
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    source = CheckpointSource(tmp_path)
    source.check(expert)
    (tmp_path / f"{FILE}.index.json").write_text("torn")
    with pytest.raises(ValueError, match=r"safetensors\.index\.json cannot be read"):
        CheckpointSource(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(source.rows(name, tensor.shape, slice(1, 3)), tensor[1:3])
