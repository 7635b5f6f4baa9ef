"""What the tests of formulas share."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRECISIONS = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
"""Our code in float64 and in float32, and how close it must come to a float64 oracle."""


def close(actual: torch.Tensor, expected: Array | float, tolerance: float, *, floor: float = 0.0) -> None:
    """Within `tolerance` of the largest element, or of `floor`."""
    wanted = np.asarray(expected, dtype=np.float64)
    scale = max(floor, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(as_float64(actual), wanted, rtol=0, atol=tolerance * scale)


def as_float64(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.detach().double().numpy())


def per_row(values: Array, like: Array) -> Array:
    """(B,) to a shape that broadcasts over the rows of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def row_mean(values: Array) -> Array:
    """(B, ...) to (B,)."""
    return np.asarray(values.reshape(len(values), -1).mean(axis=1))


def backward(loss: torch.Tensor) -> None:
    """Runs the backward of the sum over rows."""
    loss.sum().backward()  # type: ignore[no-untyped-call]


def gradient(tensor: torch.Tensor | None) -> torch.Tensor:
    """What `backward` left in a tensor, 0 if nothing."""
    assert tensor is not None
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
