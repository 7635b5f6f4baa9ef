from __future__ import annotations

import pytest
import torch

from flowfleet.quantization import products
from flowfleet.quantization.rows import quantize_rows

SEEN = "_scaled_mm"


@pytest.mark.parametrize("num_rows", [1, 4, 24, 63, 64, 65])
def test_a_product_is_padded_to_rows_that_cublas_takes(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied, seen = torch._scaled_mm, list[int]()

    def watched(rows: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(len(rows))
        return multiplied(rows, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, SEEN, watched)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    weight, scale = quantize_rows(torch.randn(32, 64, generator=generator))
    bias = torch.randn(32, generator=generator).bfloat16()
    x.requires_grad_()

    product = products.fp8_linear(x, weight, scale.t().contiguous(), bias)
    product.sum().backward()  # type: ignore[no-untyped-call]

    rows, row_scale = quantize_rows(x.detach())
    exact = (rows.double() * row_scale) @ (weight.double() * scale).t() + bias.double()
    assert product.shape == (num_rows, 32)
    torch.testing.assert_close(product.double(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert seen == [max(num_rows, 64)] * 2
