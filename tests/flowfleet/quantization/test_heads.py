"""Queries and keys of a joint attention in one pass: values, gradients, and Qwen-Image's attention made of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowfleet.models.families.qwen_image_attention import rotated
from flowfleet.quantization import fused, heads
from tests.flowfleet.quantization.test_adapted import made, random, velocity

WIDTH = 8


def arguments(*, has_norms: bool) -> list[Any]:
    """Streams of 3 and 4 tokens with two heads, weights of their norms, frequencies as complex numbers."""
    text, image = random(2, 3, 16).double(), random(2, 4, 16, seed=1).double()
    weights = [random(WIDTH, seed=seed).double() if has_norms else None for seed in (2, 3)]
    angles = [random(tokens, WIDTH // 2, seed=tokens).double() for tokens in (3, 4)]
    return [text, image, *weights, *(torch.polar(torch.ones_like(it), it) for it in angles)]


def expected(text: Tensor, image: Tensor, *others: Any) -> Tensor:
    """Stream by stream with complex products and torch's RMS norm."""
    streams = []
    for x, weight, freqs in zip((text, image), others[:2], others[2:], strict=True):
        split = torch.unflatten(x, -1, (-1, WIDTH))
        if weight is not None:
            split = torch.nn.functional.rms_norm(split, (WIDTH,), weight, 1e-6)
        turned = torch.view_as_complex(torch.unflatten(split, -1, (-1, 2))) * freqs[:, None]
        streams.append(torch.view_as_real(turned).flatten(-2))
    return torch.cat(streams, dim=1)


def found(text: Tensor, image: Tensor, *others: Any) -> Tensor:
    return heads.joint_heads(text, image, others[:2], others[2:], width=WIDTH, eps=1e-6)


@pytest.mark.parametrize("has_norms", [False, True])
def test_values_and_gradients_are_those_of_complex_products(has_norms: bool) -> None:
    """In float64."""
    given = arguments(has_norms=has_norms)
    inputs = [part.requires_grad_() for part in given[:4] if part is not None]
    ours, theirs = found(*given), expected(*given)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grad = random(*ours.shape, seed=9).double()
    for one, other in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_torch_compile_knows_the_operator() -> None:
    given = [part.to(torch.complex64 if part.is_complex() else torch.float32) for part in arguments(has_norms=True)]
    as_pairs = [*given[:4], *(torch.view_as_real(part).flatten(1) for part in given[4:]), WIDTH, 1e-6]
    as_pairs[0].requires_grad_()
    operator: Any = torch.ops.flowfleet
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator.joint_heads, tuple(as_pairs), test_utils=checks)
    compiled: Any = torch.compile(operator.joint_heads, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*as_pairs), operator.joint_heads(*as_pairs))


def test_rotation_is_the_one_of_the_plain_way() -> None:
    x, freqs = random(2, 3, 16), torch.polar(torch.ones(3, WIDTH // 2), random(3, WIDTH // 2).float())
    pairs = torch.view_as_real(freqs).flatten(1)
    plain = rotated(torch.unflatten(x, -1, (-1, WIDTH)), freqs)
    assert torch.equal(heads.heads_formula(x, None, pairs, WIDTH, 0.0), plain)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_attention_takes_them_where_there_is_a_kernel(
    kind: Any, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what the plain way gives, which diffusers' own norms are part of."""
    adapter, widths = made(tiny_qwen_image, kind), list[int]()
    expected = velocity(adapter)
    monkeypatch.setattr(fused, "is_on", lambda device: True)

    def fits(width: int, device: torch.device) -> bool:
        widths.append(width)
        return True

    monkeypatch.setattr(heads, "fits", fits)
    assert torch.equal(velocity(adapter), expected)
    assert len(widths) == len(adapter.transformer.transformer_blocks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_agrees_with_the_formula_on_a_gpu() -> None:
    """The size of Qwen-Image: 24 heads of 128 channels."""
    text, image = random(2, 128, 3072).cuda(), random(2, 1024, 3072, seed=1).cuda()
    weights = [random(128, seed=seed).cuda() for seed in (2, 3)]
    angles = [random(tokens, 64, seed=tokens).float().cuda() for tokens in (128, 1024)]
    freqs = [torch.polar(torch.ones_like(it), it) for it in angles]
    joint = heads.joint_heads(text, image, (weights[0], weights[1]), (freqs[0], freqs[1]), width=128, eps=1e-6)
    exact = torch.cat(
        [
            heads.heads_formula(x.double(), weight.double(), torch.view_as_real(turn).flatten(1).double(), 128, 1e-6)
            for x, weight, turn in zip((text, image), weights, freqs, strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(joint.double(), exact, rtol=2**-8, atol=2**-12)
