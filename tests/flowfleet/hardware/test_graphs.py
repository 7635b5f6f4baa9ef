"""CUDA graphs of forwards: what is a kind, and on a GPU that replays have the bits of launched calls."""

import os
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flowfleet.hardware.graphs import MOST_ELEMENTS, Graphs, _kind, _mapped, _tensors

HAS_GPU = torch.cuda.is_available() and os.environ.get("FLOWFLEET_DEVICE") != "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor, *, mask: Tensor | None = None, sizes: list[tuple[int, int]] | None = None) -> Any:
        self.calls += 1
        hidden = self.first(x).tanh() * (1 if mask is None else mask)
        return (self.second(hidden) * (sizes[0][0] if sizes else 1),)


def test_a_cpu_calls_the_module() -> None:
    module = Model()
    x = torch.randn(2, 32)
    expected = module(x)[0]
    Graphs(module, trains=True)
    for calls in range(2, 6):
        assert torch.equal(module(x)[0], expected)
        assert module.calls == calls
    module(x)[0].sum().backward()
    assert module.first.weight.grad is not None


def test_a_kind_is_shapes_and_other_arguments() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    nested = {"a": [x, (1, None)], "b": {"c": y}}
    assert _kind(nested) == _kind({"a": [y, (1, None)], "b": {"c": x}})
    hash(_kind(nested))
    for other in (
        {"a": [x, (2, None)], "b": {"c": y}},
        {"a": [x, (1, None)], "b": {"c": y[:1]}},
        {"a": [x, (1, None)], "b": {"c": y.double()}},
    ):
        assert _kind(nested) != _kind(other)
    assert [it is one for it, one in zip(_tensors(nested), (x, y), strict=True)] == [True, True]
    mapped = _mapped(nested, lambda tensor: tensor + 1)
    assert torch.equal(mapped["b"]["c"], y + 1)
    assert mapped["a"][1] == (1, None)


@needs_gpu
@torch.no_grad()
def test_replays_have_the_bits_of_launched_calls_and_read_weights_in_place() -> None:
    module, plain, mode = Model().cuda(), Model().cuda(), [True]
    plain.load_state_dict(module.state_dict())
    Graphs(module, state=lambda: mode[0])
    generator = torch.Generator("cuda").manual_seed(0)
    for number in range(6):
        for rows, sizes in ((3, None), (5, [(2, 2)])):
            x = torch.randn(rows, 32, device="cuda", generator=generator)
            assert torch.equal(module(x, sizes=sizes)[0], plain(x, sizes=sizes)[0])
        if number == 3:
            for it in (module, plain):
                it.first.weight.mul_(1.5)
    assert module.calls == 4  # launched and captured, of two kinds
    mode[0] = False
    module(x)
    assert module.calls == 5
    module(torch.zeros(MOST_ELEMENTS // 32 + 1, 32, device="cuda"))
    assert module.calls == 6


@needs_gpu
def test_gradients_are_those_of_launched_calls() -> None:
    module, plain = Model().cuda(), Model().cuda()
    plain.load_state_dict(module.state_dict())
    module.first.bias.requires_grad_(False)
    Graphs(module, trains=True)
    for _ in range(4):
        x = torch.randn(3, 32, device="cuda")
        for it in (module, plain):
            it.zero_grad(set_to_none=True)
            it(x)[0].square().mean().backward()
        for name, parameter in module.named_parameters():
            assert (
                parameter.grad is None
                if name == "first.bias"
                else torch.equal(
                    parameter.grad,  # type: ignore[arg-type]
                    plain.get_parameter(name).grad,  # type: ignore[arg-type]
                )
            )
    assert module.calls == 2


@needs_gpu
def test_gradients_of_several_backwards_add_up() -> None:
    module, plain = Model().cuda(), Model().cuda()
    plain.load_state_dict(module.state_dict())
    Graphs(module, trains=True)
    for rows in (3, 3, 3, 2, 2, 3, 2):
        x = torch.randn(rows, 32, device="cuda")
        for it in (module, plain):
            it(x)[0].square().mean().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    assert module.calls == 4


@needs_gpu
def test_a_second_forward_before_the_backward_is_launched() -> None:
    module, plain = Model().cuda(), Model().cuda()
    plain.load_state_dict(module.state_dict())
    Graphs(module, trains=True)
    x, y = torch.randn(3, 32, device="cuda"), torch.randn(3, 32, device="cuda")
    for _ in range(3):
        for it in (module, plain):
            it.zero_grad(set_to_none=True)
            (it(x)[0] * it(y)[0]).sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    module(x)  # its result is dropped, and nothing is in flight any more
    calls = module.calls
    module(x)[0].sum().backward()
    assert module.calls == calls


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_capture_that_fails_gives_back_what_graphs_hold(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error("operation not permitted when stream is capturing")

    graphs = Graphs(Model(), trains=True)
    graphs._graphs.update(captured=cast(Any, object()), launched=None)
    graphs._pool, graphs._grads = object(), {nn.Parameter(): torch.zeros(1)}
    monkeypatch.setattr(graphs, "_captured", fails)
    assert graphs._capture((), {}) is None
    assert [*graphs._graphs] == ["launched"], "kinds whose capture failed stay launched"
    assert graphs._pool is None
    assert not graphs._grads
