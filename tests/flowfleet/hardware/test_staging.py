"""Copies through buffers, with threads and streams that a CPU has only in name."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

from flowfleet.hardware import devices, staging


class Stream(contextlib.nullcontext[None]):
    def __init__(self, device: torch.device) -> None:
        super().__init__()

    waits = 0

    def synchronize(self) -> None:
        Stream.waits += 1


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An accelerator that is the CPU; the threads that copied."""
    threads: list[str] = []
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    for name in ("synchronize", "bind"):
        monkeypatch.setattr(devices, name, lambda device: threads.append(threading.current_thread().name))
    monkeypatch.setattr(devices, "byte_buffer", lambda size, device: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(staging, "_PIECE_BYTES", 2**12)
    return threads


def test_large_tensors_are_copied_in_pieces_by_threads(staged: list[str]) -> None:
    sources = [torch.randn(shape).to(dtype) for shape, dtype in (
        ((3, 40_001), torch.float32), ((70_000,), torch.bfloat16), ((5,), torch.float32), ((64, 64), torch.float64),
    )]  # fmt: skip
    targets = [torch.zeros_like(source) for source in sources]
    transposed = torch.zeros(400, 300).T
    other_dtype = torch.zeros(300, 400, dtype=torch.bfloat16)
    large = torch.randn(300, 400)
    staging.copy_all([*zip(targets, sources, strict=True), (transposed, large), (other_dtype, large)])
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert torch.equal(transposed, large)
    assert torch.equal(other_dtype, large.bfloat16())
    assert any(name.startswith("staging") for name in staged)  # one thread may be quick enough to copy all
    assert Stream.waits > 0


def test_a_module_is_moved_as_torch_does(staged: list[str]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
    model[1].weight = model[0].weight
    expected: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = dict(model.named_parameters())
    staging.move(model, "cpu")
    assert {**model.state_dict()}.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model[1].weight is model[0].weight
    assert all(parameter is held[name] for name, parameter in model.named_parameters())
