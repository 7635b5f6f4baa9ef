"""Activations in host memory: on a GPU gradients have the bits of those without, launched and replayed."""

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowfleet.hardware.graphs import Graphs
from flowfleet.hardware.offloading import Offload

HAS_GPU = torch.cuda.is_available() and os.environ.get("FLOWFLEET_DEVICE") != "cpu"
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
BLOCKS, ROWS, WIDTH = 12, 512, 1024


class Model(nn.Module):
    """Checkpointed blocks of two streams, the second of which is small in some calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, x: Tensor, text: Tensor) -> Any:
        for block in self.blocks:
            x, text = checkpoint(lambda *it, block=block: _both(block, *it), x, text, use_reentrant=False)
        return (x.sum() + text.sum(),)


def _both(block: nn.Module, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    x = x + block(x).tanh()
    return x, text + block(text).tanh() * x.mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH, device="cuda"), torch.randn(rows, WIDTH, device="cuda")


def made(*, graphs: bool) -> tuple[Model, Model, Offload]:
    module, plain = Model().cuda(), Model().cuda()
    offload = Offload(module, torch.device("cuda", torch.cuda.current_device()))
    if graphs:
        captured = Graphs(module, trains=True, may_replay=lambda: offload.is_empty)
        offload.is_replaying = captured.is_in_flight
    return module, plain, offload


def grads(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_gradients_have_the_same_bits(graphs: bool) -> None:
    module, plain, offload = made(graphs=graphs)
    for rows in (ROWS, 4, ROWS, 4, ROWS, 4, 2 * ROWS, 4):
        given = batch(rows)
        for it in (module, plain):
            it(*given)[0].backward()
        assert all(torch.equal(one, other) for one, other in zip(grads(module), grads(plain), strict=True))
        assert offload.is_empty


@pytest.mark.parametrize("graphs", [False, True])
def test_two_forwards_may_await_their_backward(graphs: bool) -> None:
    """A new kind is launched while another one's backward is to be replayed, and the other way round."""
    module, plain, _ = made(graphs=graphs)
    for first, second in pairwise((4, 4, 4, ROWS, 4, ROWS, ROWS, 2 * ROWS, 4)):
        given = batch(first), batch(second)
        for it in (module, plain):
            (it(*given[0])[0] * it(*given[1])[0]).backward()
        for one, other in zip(grads(module), grads(plain), strict=True):  # replays add up in another order
            assert float((one - other).abs().max()) < 1e-4 * float(other.abs().max())


def test_blocks_inputs_leave_the_device() -> None:
    held = []
    for it in made(graphs=False)[:2]:
        before = torch.cuda.memory_allocated()
        loss = it(*batch(ROWS))[0]
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    assert held[1] - held[0] > (2 * BLOCKS - 4) * ROWS * WIDTH * 4
