"""Dummy weights."""

import pytest
import torch

from flowfleet.models.loading import dummy_parameter


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [("a.norm.weight", (7,), 1.0), ("vae.norm.gamma", (7, 1, 1, 1), 1.0), ("a.linear.bias", (7,), 0.0)],
)
def test_dummy_scales_are_one_and_biases_zero(name: str, shape: tuple[int, ...], value: float) -> None:
    assert torch.equal(dummy_parameter(name, shape, torch.float32, "cpu"), torch.full(shape, value))


def test_dummy_matrices_are_normal_and_drawn_from_their_name() -> None:
    torch.manual_seed(0)
    first = dummy_parameter("transformer.a.weight", (300, 400), torch.float32, "cpu")
    torch.manual_seed(1)
    assert torch.equal(first, dummy_parameter("transformer.a.weight", (300, 400), torch.float32, "cpu"))
    assert float(first.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(first.mean())) < 5 * 0.02 / 120_000**0.5
    other = dummy_parameter("transformer.b.weight", (300, 400), torch.float32, "cpu")
    assert abs(float((first * other).mean())) < 5 * 0.02**2 / 120_000**0.5
    half = dummy_parameter("transformer.a.weight", (300, 400), torch.bfloat16, "cpu")
    assert torch.equal(half, first.to(torch.bfloat16))
