"""Weights of a picture and a sound, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowfleet.algorithms.losses import reference_kl
from flowfleet.algorithms.parts import LatentParts, joined, scaled
from flowfleet.algorithms.sde import reverse_step

LENGTHS = (40, 10)


def drawn(number: int) -> Tensor:
    return torch.randn(number, 3, 50, generator=torch.Generator().manual_seed(number))


def log_density(deviation: Tensor, std: float) -> Tensor:
    return (-(deviation.double() ** 2) / (2 * std**2) - torch.tensor(std).double().log() - 0.918938533204673).mean(1)


@pytest.mark.parametrize("weight", [None, 0.0, 0.5, 1.0])
def test_log_probs_are_joined_of_those_of_the_parts(weight: float | None) -> None:
    latents, velocity, noise = drawn(3)
    parts = LatentParts.of(LENGTHS, weight)
    assert parts is not None
    step = replace(reverse_step("sde"), parts=parts)
    found = step(latents, velocity, 0.6, 0.4, eta=0.7, sigma_max=0.9, noise=noise)
    deviation, std = found.prev_sample - found.mean, float(found.std[0])
    each = [log_density(deviation[:, :40], std), log_density(deviation[:, 40:], std)]
    torch.testing.assert_close(found.part_log_probs, torch.stack(each, 1), rtol=0, atol=1e-6)
    share = 0.2 if weight is None else weight
    torch.testing.assert_close(found.log_prob, (1 - share) * each[0] + share * each[1], rtol=0, atol=1e-6)
    assert torch.equal(joined(found.part_log_probs, parts), found.log_prob)
    if weight is None:
        plain = reverse_step("sde")(latents, velocity, 0.6, 0.4, eta=0.7, sigma_max=0.9, noise=noise)
        torch.testing.assert_close(plain.log_prob, found.log_prob, rtol=0, atol=1e-9)
        assert plain.part_log_probs.shape == (3, 1)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_mean_square_of_scaled_values_is_weighted(weight: float) -> None:
    first, second = drawn(2)
    parts = LatentParts.of(LENGTHS, weight)
    found = reference_kl(scaled(first, parts), scaled(second, parts), torch.full((3,), 0.5))
    squares = (first - second).double().square()
    expected = ((1 - weight) * squares[:, :40].mean(1) + weight * squares[:, 40:].mean(1)) / 0.5
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_parts_that_count_alike_change_nothing() -> None:
    values = drawn(1)[0]
    assert scaled(values, LatentParts.of(LENGTHS, None)) is values
    assert scaled(values, None) is values
    assert LatentParts.of((), 0.5) is None
