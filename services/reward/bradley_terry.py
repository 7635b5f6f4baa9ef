"""Scores from comparisons of pairs: Bradley and Terry, "Rank analysis of incomplete block designs" (1952). Pure.

Sample i is preferred to j with probability σ(θ_i − θ_j). The scores θ are the most probable ones under independent
normal priors of mean 0 and standard deviation s:

    maximize  Σ_ij w_ij · log σ(θ_i − θ_j)  −  Σ_i θ_i² / (2 s²)

where w_ij is how often i was preferred to j; a tie is half a preference each way. The prior makes the problem strictly
concave, so scores are unique, finite and of mean 0 even where a sample won or lost each of its comparisons.
"""

import numpy as np
from numpy.typing import NDArray

MAX_ITERATIONS, TOLERANCE = 100, 1e-12


def scores(wins: NDArray[np.float64], prior_std: float) -> NDArray[np.float64]:
    """(N,) scores θ of N samples from wins[i, j] ≥ 0, how often i was preferred to j; a tie counts 0.5 in both places.

    Newton's method with halved steps. `prior_std` > 0: the s above.
    """
    total, precision = wins + wins.T, prior_std**-2
    theta = np.zeros(len(wins))
    value = _objective(theta, wins, precision)
    for _ in range(MAX_ITERATIONS):
        chance = preferred(theta)
        slope = (wins - total * chance).sum(axis=1) - precision * theta
        weight = total * chance * (1 - chance)
        curvature = np.diag(weight.sum(axis=1) + precision) - weight
        step = np.linalg.solve(curvature, slope)
        while (found := _objective(theta + step, wins, precision)) < value and np.abs(step).max() > TOLERANCE:
            step /= 2
        theta, value = theta + step, found
        if np.abs(step).max() <= TOLERANCE * max(1.0, np.abs(theta).max()):
            break
    return theta


def preferred(theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, N) probability that sample i is preferred to j; ½ on the diagonal."""
    return np.exp(-np.logaddexp(0.0, theta[None] - theta[:, None]))


def _objective(theta: NDArray[np.float64], wins: NDArray[np.float64], precision: float) -> float:
    log_chance = -np.logaddexp(0.0, theta[None] - theta[:, None])
    return float((wins * log_chance).sum() - precision * (theta**2).sum() / 2)
