"""Runs the Triton kernels of flowfleet/quantization in Triton's interpreter and compares them with their formulas. A
process of its own: `python -m tests.flowfleet.quantization.interpreted` with TRITON_INTERPRET=1."""

from typing import Any

import torch
from torch import Tensor

from flowfleet.quantization import fused, fused_triton, heads, heads_triton, rows, rows_triton

SMALLEST_NORMAL = 2.0**-6


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows(found: tuple[Tensor, Tensor], values: Tensor) -> None:
    """Rows and scales are those of the values, but for what Triton 3.6's interpreter rounds in its own way: ties, what
    is below the smallest normal number, and, where rounding carries into the exponent, that carry, which it loses."""
    expected, scale = rows.formula(values)
    torch.testing.assert_close(found[1], scale, rtol=1e-6, atol=0)
    ours, theirs, exact = found[0].float(), expected.float(), values.float() * (1 / scale)
    is_tie = torch.isclose((ours - exact).abs(), (theirs - exact).abs(), rtol=1e-3)
    lost_carry, is_small = 2 * ours == theirs, exact.abs() < SMALLEST_NORMAL
    assert bool(((ours == theirs) | is_tie | lost_carry | is_small).all())
    assert float((ours != theirs).double().mean()) < 0.05


def check_rows() -> None:
    x, factors = random(5, 200, seed=1), torch.rand(200) + 0.5
    x[2] = 0
    assert_rows(rows_triton.quantize_rows(x, None), x)
    assert_rows(rows_triton.quantize_rows(x, factors), x.float() * factors)


def check_gelu() -> None:
    x = random(6, 200, seed=2) * torch.tensor([0.01, 1, 3, 30, 1e4, 0]).bfloat16()[:, None]
    values, *quantized = fused_triton.gelu_rows(x)
    torch.testing.assert_close(values, fused.gelu_formula(x)[0], rtol=2**-7, atol=1e-6)
    assert_rows((quantized[0], quantized[1]), values)


def check_norm() -> None:
    x, change, modulation = random(2, 3, 200, seed=3), random(2, 3, 200, seed=4), random(2, 600, seed=5)
    shift, scale, gate = modulation.chunk(3, dim=-1)
    assert not scale.is_contiguous()
    pairs: list[Any] = [(None, None), (gate, change)]
    for parts in pairs:
        given: list[Any] = [x + 2, *parts, shift, scale, 1e-6]
        total, values, *quantized = fused_triton.norm_rows(*given)
        doubles: list[Any] = [it.double() if isinstance(it, torch.Tensor) else it for it in given]
        exact = fused.norm_formula(*doubles)
        assert total.shape == exact[0].shape
        torch.testing.assert_close(
            total.double(), exact[0], rtol=2**-7, atol=0
        )  # the interpreter truncates to bfloat16
        torch.testing.assert_close(values.double(), exact[1], rtol=2**-7, atol=2**-5)  # of a sum that was truncated
        assert_rows((quantized[0], quantized[1]), values.view(-1, 200))


def check_heads() -> None:
    """Ten heads of 16 channels, one block and a part of the next."""
    text, image = random(2, 3, 160, seed=6), random(2, 4, 160, seed=7)
    weights = [random(16, seed=seed) for seed in (8, 9)]
    freqs = [random(tokens, 16, seed=tokens, dtype=torch.float32) for tokens in (3, 4)]
    for text_weight, image_weight in (weights, (None, weights[1])):
        found = heads_triton.joint_heads(text, image, text_weight, image_weight, freqs[0], freqs[1], 16, 1e-6)
        exact = torch.cat(
            [
                heads.heads_formula(x.double(), None if weight is None else weight.double(), turn.double(), 16, 1e-6)
                for x, weight, turn in ((text, text_weight, freqs[0]), (image, image_weight, freqs[1]))
            ],
            dim=1,
        )
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-16)


if __name__ == "__main__":
    check_rows()
    check_gelu()
    check_norm()
    check_heads()
    print("all kernels agree")
