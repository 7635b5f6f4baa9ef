"""How sure a gain is."""

from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 10_000


def paired_bootstrap(
    before: Sequence[float], after: Sequence[float], seed: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of mean(after − before), the pairs drawn with replacement.

    Both sequences hold the same prompts in the same order, at least one. Raises ValueError otherwise.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"a paired bootstrap needs pairs, not {len(before)} and {len(after)} scores")
    gains = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(gains), size=(NUM_RESAMPLES, len(gains)))
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.percentile(gains[draws].mean(axis=1), [tail, 100.0 - tail])
    return float(low), float(high)
