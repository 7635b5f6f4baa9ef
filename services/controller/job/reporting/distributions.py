"""How the rewards and advantages of a step are distributed, small enough for an event. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

NUM_BINS: Final = 32


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Counts of `NUM_BINS` equal bins from `low` to `high`; None without a value."""
    if not values:
        return None
    counts, edges = np.histogram(np.asarray(values, np.float64), NUM_BINS)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def histograms(columns: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Name → histogram, of the columns that have values."""
    found = {name: histogram(values) for name, values in columns.items()}
    return {name: one for name, one in found.items() if one is not None}
