"""The same weights are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowfleet.weights.files import sort_metadata

MANY = {f"ключ {n}": '{"r": 4, "\\"": "\x1f\u2028/"}' for n in range(9)}


@pytest.mark.parametrize("metadata", [{}, {"a": "b"}, MANY])
def test_the_order_of_metadata_is_fixed(tmp_path: Path, metadata: dict[str, str]) -> None:
    tensors = {name: torch.randn(3, 5) for name in ("b.weight", "a.weight")}
    found = set()
    for number in range(12):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path, metadata=metadata or None)
        sort_metadata(path)
        found.add(path.read_bytes())
        with safe_open(path, framework="pt") as opened:
            assert (opened.metadata() or {}) == metadata
            assert all(torch.equal(opened.get_tensor(name), tensor) for name, tensor in tensors.items())
    assert len(found) == 1
