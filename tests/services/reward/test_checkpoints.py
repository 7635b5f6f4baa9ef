"""Fingerprints and scalars of checkpoints, without torch."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.reward.networks.checkpoints import fingerprint, read_scalar


def checkpoint(folder: Path, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Path:
    folder.mkdir()
    save_file({"weight": values}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_fingerprint_follows_content_alone(tmp_path: Path) -> None:
    """Any file of a few KiB counts whole, and of a large one training changes what is looked at."""
    values = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)
    first, again = checkpoint(tmp_path / "first", values), checkpoint(tmp_path / "again", values)
    trained = checkpoint(tmp_path / "trained", values + np.float32(1e-3))
    assert fingerprint(first) == fingerprint(again)
    assert len({fingerprint(folder) for folder in (first, trained)}) == 2
    (again / "README.md").write_text("does not matter")
    assert fingerprint(first) == fingerprint(again)
    for name, text in (("config.json", '{"a": 1}'), ("tokenizer.json", "{}")):
        (again / name).write_text(text)
        assert fingerprint(first) != fingerprint(again)
        (again / name).write_text("{}")
    assert fingerprint(first / "model.safetensors") == fingerprint(again / "model.safetensors")
    assert fingerprint(first, trained) != fingerprint(trained, first)


def test_every_number_of_a_small_file_counts(tmp_path: Path) -> None:
    values = np.zeros(1000, np.float32)
    whole = fingerprint(checkpoint(tmp_path / "whole", values))
    for place in (0, 500, 999):
        changed = values.copy()
        changed[place] = 1.0
        assert fingerprint(checkpoint(tmp_path / str(place), changed)) != whole


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("F32", struct.pack("<f", 4.5)),
        ("F16", struct.pack("<e", 4.5)),
        ("F64", struct.pack("<d", 4.5)),
        ("BF16", struct.pack("<f", 4.5)[2:]),  # 4.5 needs three bits of the mantissa
    ],
)
def test_a_scalar_of_any_kind(kind: str, data: bytes, tmp_path: Path) -> None:
    header = {
        "other": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "logit_scale": {"dtype": kind, "shape": [], "data_offsets": [4, 4 + len(data)]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4 + data)
    assert math.isclose(read_scalar(tmp_path, "model", "logit_scale"), 4.5)
    with pytest.raises(ValueError, match=r"settings\.model = .* has no logit_bias"):
        read_scalar(tmp_path, "model", "logit_bias")
