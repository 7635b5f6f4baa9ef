"""Which prompt a group of a step gets: a pure function of the seed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flowfleet.prompts.prompt import Prompt
from flowfleet.seeds import derive_seed

MAX_PASSES = 2
"""Orders that are remembered; one of a million prompts has 8 MB."""
MAX_STEPS = 32
"""Steps that are remembered: more than can be open at once."""


class Deal:
    """Deals `count` prompts to each step: passes through the data, each with its own shuffle, cut into steps. Nothing
    is left out. Remembers the orders of the last passes and what the last steps were given."""

    def __init__(self, prompts: list[Prompt], seed: int, count: int) -> None:
        self._prompts, self._seed, self._count = prompts, seed, count
        self._order = lru_cache(MAX_PASSES)(self._shuffled)
        self.of_step = lru_cache(MAX_STEPS)(self._dealt)
        """Gives the prompts of a step, one a group."""

    def _dealt(self, step: int) -> tuple[Prompt, ...]:
        places = (divmod(step * self._count + k, len(self._prompts)) for k in range(self._count))
        return tuple(self._prompts[self._order(number)[offset]] for number, offset in places)

    def _shuffled(self, number: int) -> Any:
        """Positions of the prompts in the order of a pass."""
        return np.random.default_rng(derive_seed(self._seed, "epoch", number)).permutation(len(self._prompts))
