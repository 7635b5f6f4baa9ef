"""Which source of a job's data each group of a step draws from: a pure function of the seed and the step.

A step's groups are shared out by the weights of that step. A source whose share is 12.3 groups gets 12 or 13 of them:
one offset a step decides all sources (systematic sampling), and the offsets of successive steps follow the golden
ratio, so that the total of any stretch of steps stays within about a group of its share.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flowfleet.job.data import Source
from flowfleet.seeds import derive_seed

BLOCK = 1024
"""Steps that are counted together."""
_GOLDEN = (5**0.5 - 1) / 2


class Mixture:
    """Sources of `count` groups a step."""

    def __init__(self, sources: Sequence[Source], seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self._sources = tuple(sources)
        self._offset = derive_seed(seed, "sources") / 2**63
        self._of_block = lru_cache(None)(self._count_block)

    @property
    def num_sources(self) -> int:
        return len(self._sources)

    def of_step(self, step: int) -> NDArray[np.int64]:
        """(count,) number of the source of each group."""
        drawn = np.repeat(np.arange(self.num_sources), self.counts(np.array([step]))[0])
        if self.num_sources == 1:
            return drawn
        order: NDArray[np.int64] = np.random.default_rng(derive_seed(self.seed, "sources", step)).permutation(drawn)
        return order

    def before(self, step: int) -> NDArray[np.int64]:
        """(sources,) groups that each source has in all steps before one."""
        blocks, rest = divmod(step, BLOCK)
        total: NDArray[np.int64] = self.counts(np.arange(step - rest, step)).sum(axis=0)
        return sum((self._of_block(block) for block in range(blocks)), total)

    def counts(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """(steps, sources) groups of each source; a row sums to `count`."""
        shares = self.shares(steps)
        ends = self.count * np.cumsum(shares, axis=1) - ((self._offset + _GOLDEN * steps) % 1.0)[:, None]
        ends = np.clip(np.ceil(ends), 0, self.count).astype(np.int64)
        last = self.num_sources - 1 - np.argmax(shares[:, ::-1] > 0, axis=1)
        ends[np.arange(self.num_sources) >= last[:, None]] = self.count  # whatever the sum of the shares rounds to
        return np.diff(ends, axis=1, prepend=0)

    def shares(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """(steps, sources) weights at the steps, which sum to 1."""
        weights = np.empty((len(steps), self.num_sources))
        for number, source in enumerate(self._sources):
            points = np.array(source.curve or ((0, 1.0),), dtype=np.float64)
            weights[:, number] = source.weight * np.interp(steps, points[:, 0], points[:, 1])
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def _count_block(self, block: int) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self.counts(np.arange(block * BLOCK, (block + 1) * BLOCK)).sum(axis=0)
        return total
