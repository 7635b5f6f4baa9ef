"""Modules that stream from host memory compute what they did, layer by layer."""

import pytest
import torch
from torch import Tensor, nn

from flowfleet.hardware import streaming

CPU = torch.device("cpu")


class Encoder(nn.Module):
    """Embeddings that are also the output layer's weights, layers with a list inside, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.offset
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x).tanh()
        return x


def test_results_are_the_same_bits_and_a_layer_is_there_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, ids, seen = Encoder().bfloat16().requires_grad_(False), torch.arange(7)[None], []
    expected = module(ids)
    bring, drop = streaming._Group.bring, streaming._Group.drop

    def counted(group: streaming._Group, *, comes: bool) -> None:
        seen.append((len(group._parameters), comes))
        (bring if comes else drop)(group)

    streaming.stream(module, CPU)
    monkeypatch.setattr(streaming._Group, "bring", lambda group: counted(group, comes=True))
    monkeypatch.setattr(streaming._Group, "drop", lambda group: counted(group, comes=False))
    for _ in range(2):
        seen.clear()
        assert torch.equal(module(ids), expected)
        assert seen == [(3, True), *[(3, True), (3, False)] * 3, (3, False)]
    assert module.head.weight is module.embed.weight


def test_a_failing_forward_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Encoder().requires_grad_(False)
    streaming.stream(module, CPU)
    dropped: list[int] = []
    monkeypatch.setattr(streaming._Group, "drop", lambda group: dropped.append(len(group._parameters)))
    with pytest.raises(IndexError):
        module(torch.tensor([[12]]))
    assert dropped == [3]
