"""Guards by hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipes.composition.judges.guards import diversity, features, frechet, parted
from recipes.composition.judges.networks.lite import Lite


def test_frechet_distance_of_gaussians() -> None:
    """In one dimension (μ₁ − μ₂)² + (σ₁ − σ₂)²; with diagonal covariances their sum."""
    draws = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = other * torch.tensor([2.0, 0.5]) + torch.tensor([3.0, -1.0])
    assert frechet(draws, moved) == pytest.approx(9 + 1 + 1 + 0.25, rel=0.01)
    assert frechet(draws, draws) == pytest.approx(0.0, abs=1e-6)


def test_frechet_distance_of_correlated_features_is_that_of_the_symmetric_root() -> None:
    """The trace of √(AB) is that of √(√A · B · √A), of which each root is of a symmetric matrix."""
    generator = torch.Generator().manual_seed(3)
    ours, theirs = (
        torch.randn(300, 6, generator=generator, dtype=torch.float64)
        @ torch.randn(6, 6, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    first, second = np.cov(ours.numpy().T), np.cov(theirs.numpy().T)
    values, vectors = np.linalg.eigh(first)
    half = vectors * np.sqrt(values) @ vectors.T
    root = np.sqrt(np.linalg.eigvalsh(half @ second @ half)).sum()
    expected = float((ours.mean(0) - theirs.mean(0)).square().sum()) + np.trace(first + second) - 2 * root
    assert frechet(ours, theirs) == pytest.approx(expected, rel=1e-6)


def test_a_distance_wants_two_pictures() -> None:
    with pytest.raises(ValueError, match="at least two pictures"):
        frechet(torch.zeros(1, 2), torch.zeros(5, 2))


def test_diversity_is_the_mean_distance_of_a_prompts_pictures() -> None:
    tries = [torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.zeros(2, 2)]
    assert diversity(tries) == pytest.approx((2.5 + math.sqrt(2) / 2 + (5 + math.sqrt(2)) / 2) / 3)
    with pytest.raises(ValueError, match="at least two"):
        diversity(tries[:1])


def test_judges_part_where_one_accepts() -> None:
    assert parted([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]) == 0.5


def test_features_are_of_each_picture_alone() -> None:
    torch.manual_seed(1)
    net = Lite()
    pictures = np.random.default_rng(1).integers(0, 255, (3, 64, 64, 3), np.uint8)
    found = features(net, pictures)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[1:2], features(net, pictures[1:2]), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0], found[1])
