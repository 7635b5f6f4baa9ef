"""An adapter on ranks that hold all of it, on a rank alone: copies follow their masters, gradients add up in fp32."""

import pytest
import torch
from torch import Tensor, nn

from services.trainer.parallel import replicated
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.replicated import ReplicatedAdapter
from services.trainer.parallel.sharding import exchanged, local

DTYPES = [torch.float32, torch.bfloat16]


class Expert(nn.Module):
    """A frozen weight and three trained ones, of which a forward uses the first two."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(torch.randn(4, 4).to(dtype), requires_grad=False)
        self.down, self.up, self.unused = (nn.Parameter(torch.randn(shape)) for shape in ((2, 4), (4, 2), (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.base.t() + x @ self.down.t() @ self.up.t()


def made(ranks: Ranks, dtype: torch.dtype) -> tuple[Expert, ReplicatedAdapter]:
    expert = Expert(dtype)
    trained = {f"t.{name}": p for name, p in expert.named_parameters() if p.requires_grad}
    return expert, ReplicatedAdapter(expert, trained, ranks, dtype)


def x_of(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forward_computes_with_the_masters_as_they_are(dtype: torch.dtype, ranks: Ranks) -> None:
    expert, adapter = made(ranks, dtype)
    start = {name: local(master).clone() for name, master in adapter.masters.items()}
    assert expert.down.dtype == dtype
    assert all(master.dtype == torch.float32 for master in adapter.masters.values())
    for change in (0.0, 1e-4, -0.5):  # the second is less than a step of bfloat16: masters keep it
        with torch.no_grad():
            for master in adapter.masters.values():
                local(master).add_(change)
        down, up = (local(adapter.masters[f"t.{name}"]).to(dtype) for name in ("down", "up"))
        x = x_of(1, dtype)
        assert torch.equal(expert(x), x @ expert.base.t() + x @ down.t() @ up.t())
    for name, value in start.items():
        torch.testing.assert_close(local(adapter.masters[name]), value - 0.4999)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [replicated.CHUNK, 1])
def test_gradients_of_an_update_add_up_in_float32(
    dtype: torch.dtype, chunk: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "CHUNK", chunk)
    expert, adapter = made(ranks, dtype)
    for update in range(2):
        expected: dict[str, Tensor] = {}
        for number in range(3):
            x = x_of(10 * update + number, dtype)
            wanted = torch.autograd.grad(expert(x).float().square().sum(), [expert.down, expert.up])
            for name, grad in zip(("t.down", "t.up"), wanted, strict=True):
                expected[name] = expected.get(name, torch.zeros(grad.shape)) + grad.float()
            assert all(master.grad is None for master in adapter.masters.values())
            expert(x).float().square().sum().backward()
            adapter.collect(is_last=number == 2)
            assert expert.down.grad is None
        for name, total in expected.items():
            summed = adapter.masters[name].grad
            assert summed is not None
            assert torch.equal(local(summed), total)
        assert adapter.masters["t.unused"].grad is None
        for master in adapter.masters.values():
            master.grad = None  # as an optimizer's step does


def test_a_refresh_brings_the_masters_back_before_a_backward(ranks: Ranks) -> None:
    """After a forward of another policy, whose weights were in the masters for a while."""
    expert, adapter = made(ranks, torch.bfloat16)
    x = x_of(3, torch.bfloat16)
    grads = []
    for is_disturbed in (False, True):
        output = expert(x)
        if is_disturbed:
            others = {name: torch.randn_like(local(master)) for name, master in adapter.masters.items()}
            with torch.no_grad(), exchanged(adapter.masters, others):
                expert(x)
            adapter.refresh()
        output.sum().backward()
        adapter.collect(is_last=True)
        grad = adapter.masters["t.down"].grad
        assert grad is not None
        grads.append(local(grad).clone())
    assert torch.equal(*grads)


def test_a_forward_between_a_forward_and_its_backward_changes_nothing(ranks: Ranks) -> None:
    expert, adapter = made(ranks, torch.bfloat16)
    x = x_of(3, torch.bfloat16)
    guided = expert(x) + 4 * expert(2 * x)  # two forwards, as guidance takes, then one backward
    guided.sum().backward()
    adapter.collect(is_last=True)
    down, up = (parameter.detach().clone().requires_grad_() for parameter in (expert.down, expert.up))
    plain = x @ expert.base.t() + x @ down.t() @ up.t() + 4 * (2 * x @ expert.base.t() + 2 * x @ down.t() @ up.t())
    for name, expected in zip(("t.down", "t.up"), torch.autograd.grad(plain.sum(), [down, up]), strict=True):
        summed = adapter.masters[name].grad
        assert summed is not None
        torch.testing.assert_close(local(summed), expected.float())


def test_masters_elsewhere_are_copied_once_they_changed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicatedAdapter, "_is_far", True)
    for dtype in DTYPES:
        expert, adapter = made(ranks, dtype)
        x = x_of(1, dtype)
        before = expert(x)
        with torch.no_grad():
            expert.down.fill_(9.0)
            assert not torch.equal(expert(x), before), "nothing changed, so nothing is copied"
            local(adapter.masters["t.unused"]).add_(1.0)
            assert torch.equal(expert(x), before), "a write to one of them copies all"
            local(adapter.masters["t.down"]).add_(1.0)
            assert not torch.equal(expert(x), before)


def test_sums_are_freed_between_updates_alone(ranks: Ranks) -> None:
    expert, adapter = made(ranks, torch.bfloat16)
    found = []
    for seed in (1, 2):
        for is_last in (False, True):
            expert(x_of(seed, torch.bfloat16)).sum().backward()
            adapter.collect(is_last=is_last)
            assert not adapter.free()
        found.append(local(adapter.masters["t.down"].grad).clone())  # type: ignore[arg-type]
        for master in adapter.masters.values():
            master.grad = None
        assert adapter.free()
    assert not torch.equal(*found)
