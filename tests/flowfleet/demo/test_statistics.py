import math

import pytest

from flowfleet.demo.statistics import paired_bootstrap


def binomial_quantile(n: int, p: float, q: float) -> int:
    """Smallest k with P(X ≤ k) ≥ q for X ~ Binomial(n, p)."""
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= q:
            return k
    return n


def test_the_interval_of_zero_one_gains_is_that_of_the_binomial() -> None:
    """The mean of n draws from gains of which a share p is 1 is Binomial(n, p)/n."""
    n, gained = 200, 60
    before, after = [0.0] * n, [1.0] * gained + [0.0] * (n - gained)

    low, high = paired_bootstrap(before, after, seed=3)

    assert low == pytest.approx(binomial_quantile(n, gained / n, 0.025) / n, abs=1.5 / n)
    assert high == pytest.approx(binomial_quantile(n, gained / n, 0.975) / n, abs=1.5 / n)


def test_pairs_that_gain_alike_leave_no_doubt() -> None:
    assert paired_bootstrap([0.0, 0.25, 0.5], [0.5, 0.75, 1.0], seed=1) == (0.5, 0.5)


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="needs pairs, not 2 and 1"):
        paired_bootstrap([0.0, 1.0], [1.0], seed=1)
    with pytest.raises(ValueError, match="needs pairs"):
        paired_bootstrap([], [], seed=1)
