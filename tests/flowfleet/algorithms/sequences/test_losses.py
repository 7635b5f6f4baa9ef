"""Losses on tokens against float64 oracles written from the formulas, values and gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flowfleet.algorithms.losses import Limits
from flowfleet.algorithms.sequences.losses import SequenceRows, divisors, grpo, gspo, reference_kl_k3
from flowfleet.algorithms.sequences.overlong import overlong_penalty

LENGTHS = (5, 1, 9, 3)
ADVANTAGES = (1.3, -0.7, -2.0, 0.4)


def draw(seed: int, spread: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs, old ones and weights, (N,) float64."""
    rng = np.random.default_rng(seed)
    number = sum(LENGTHS)
    old = -rng.exponential(2.0, number)
    return old + rng.normal(0, spread, number), old, rng.uniform(0.5, 1.5, number)


def rows(log_prob: Tensor, old: np.ndarray, weights: np.ndarray | None, divided: Tensor) -> SequenceRows:
    dtype = log_prob.dtype
    return SequenceRows(
        log_prob=log_prob,
        old_log_prob=torch.tensor(old, dtype=dtype),
        advantages=torch.tensor(ADVANTAGES, dtype=dtype),
        owners=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        divisors=divided.to(dtype),
        weights=None if weights is None else torch.tensor(weights, dtype=dtype),
    )


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's: max(-A r, -A clip(r))."""
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def split(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(LENGTHS)[:-1])


def gspo_oracle(new: np.ndarray, old: np.ndarray, low: float, high: float) -> list[float]:
    return [
        surrogate(float(np.exp(np.mean(a - b))), advantage, low, high)
        for a, b, advantage in zip(split(new), split(old), ADVANTAGES, strict=True)
    ]


def grpo_oracle(new: np.ndarray, old: np.ndarray, weights: np.ndarray, low: float, high: float) -> list[list[float]]:
    return [
        [w * surrogate(float(np.exp(x - y)), advantage, low, high) for x, y, w in zip(a, b, c, strict=True)]
        for a, b, c, advantage in zip(split(new), split(old), split(weights), ADVANTAGES, strict=True)
    ]


def numeric_gradient(function, at: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    step = 1e-6
    found = np.empty_like(at)
    for place in range(len(at)):
        ends = []
        for sign in (1, -1):
            moved = at.copy()
            moved[place] += sign * step
            ends.append(function(moved))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("spread", [1e-3, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_gspo_is_the_clipped_ratio_of_sequences(seed: int, spread: float) -> None:
    new, old, _ = draw(seed, spread)
    log_prob = torch.tensor(new, requires_grad=True)
    output = gspo(rows(log_prob, old, None, torch.ones(4)), Limits(4e-4, 1.0, 3e-4))
    np.testing.assert_allclose(output.loss.detach().numpy(), gspo_oracle(new, old, 3e-4, 4e-4), rtol=1e-10)
    torch.autograd.backward(output.loss.sum())
    assert log_prob.grad is not None
    expected = numeric_gradient(lambda at: sum(gspo_oracle(at, old, 3e-4, 4e-4)), new)
    np.testing.assert_allclose(log_prob.grad.numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("spread", [1e-3, 0.5])
@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_grpo_is_the_mean_over_sequences_or_over_tokens(aggregation: str, spread: float) -> None:
    """The trainer divides the sum over sequences by their number; with DAPO's limits."""
    new, old, weights = draw(3, spread)
    log_prob = torch.tensor(new, requires_grad=True)
    lengths = torch.tensor(LENGTHS)
    divided = divisors(lengths, aggregation, sum(LENGTHS) / len(LENGTHS))  # type: ignore[arg-type]
    output = grpo(rows(log_prob, old, weights, divided), Limits(0.28, 1.0, 0.2))

    def oracle(at: np.ndarray) -> float:
        losses = grpo_oracle(at, old, weights, 0.2, 0.28)
        if aggregation == "sequence":
            return float(np.mean([np.mean(own) for own in losses]))
        return float(np.mean(np.concatenate(losses)))

    loss = output.loss.sum() / len(LENGTHS)
    assert loss.item() == pytest.approx(oracle(new), rel=1e-6)
    torch.autograd.backward(loss)
    assert log_prob.grad is not None
    np.testing.assert_allclose(log_prob.grad.numpy(), numeric_gradient(oracle, new), atol=1e-7)


def test_statistics_count_sequences_for_gspo_and_tokens_for_grpo() -> None:
    new, old, _ = draw(0, 0.5)
    by_sequence = gspo(rows(torch.tensor(new), old, None, torch.ones(4)), Limits(4e-4, 1.0, 3e-4)).stats
    by_token = grpo(rows(torch.tensor(new), old, None, torch.ones(4)), Limits(0.28, 1.0, 0.2)).stats
    assert by_sequence.sums[0] == 4
    assert by_token.sums[0] == sum(LENGTHS)
    ratios = np.exp(new - old)
    assert by_token.sums[3] == (ratios > 1.28).sum()
    assert by_token.sums[4] == (ratios < 0.8).sum()
    assert by_sequence.sums[3] + by_sequence.sums[4] == 4


def test_k3_is_schulmans_estimate() -> None:
    new, reference, _ = draw(5, 0.7)
    log_prob = torch.tensor(new, requires_grad=True)
    kl = reference_kl_k3(log_prob, torch.tensor(reference))
    np.testing.assert_allclose(kl.detach().numpy(), np.exp(reference - new) - (reference - new) - 1, rtol=1e-10)
    torch.autograd.backward(kl.sum())
    assert log_prob.grad is not None
    np.testing.assert_allclose(log_prob.grad.numpy(), 1 - np.exp(reference - new), rtol=1e-9)


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (16384, 0.0), (18432, 0.5), (20480, 1.0), (16385, 1 / 4096)])
def test_overlong_penalty_is_dapos(tokens: int, penalty: float) -> None:
    """Equation 13 with L_max 20,480 and L_cache 4,096."""
    assert overlong_penalty(tokens, 20480, 0.2) == pytest.approx(penalty)
    assert overlong_penalty(tokens, 20480, 0.0) == 0.0
