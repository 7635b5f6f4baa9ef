"""Which prompt a group of a step gets: a pure function of the seed."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flowfleet.prompts.prompt import Prompt
from flowfleet.seeds import derive_seed
from services.controller.prompts.mixture import Mixture

MAX_PASSES = 2
"""Orders of a source that are remembered; one of a million prompts has 4 MB."""
MAX_STEPS = 32
"""Steps that are remembered: more than can be open at once."""


class Deal:
    """Deals the prompts of each source to the groups that the mixture gives it: passes through the source, each with
    its own shuffle, one after the other. Nothing is left out. Remembers the orders of the last passes and what the last
    steps were given."""

    def __init__(self, prompts: Sequence[Sequence[Prompt]], mixture: Mixture) -> None:
        self._prompts, self._mixture = prompts, mixture
        self._order = lru_cache(MAX_PASSES * len(prompts))(self._shuffled)
        self.of_step = lru_cache(MAX_STEPS)(self._dealt)
        """Gives the prompts of a step, one a group."""

    def _dealt(self, step: int) -> tuple[Prompt, ...]:
        dealt, found = self._mixture.before(step).tolist(), []
        for source in self._mixture.of_step(step).tolist():
            prompts = self._prompts[source]
            number, offset = divmod(dealt[source], len(prompts))
            found.append(prompts[self._order(source, number)[offset]])
            dealt[source] += 1
        return tuple(found)

    def _shuffled(self, source: int, number: int) -> Any:
        """Positions of a source's prompts in the order of a pass."""
        path = ("epoch", number, source) if source else ("epoch", number)
        order = np.arange(len(self._prompts[source]), dtype=np.uint32)
        np.random.default_rng(derive_seed(self._mixture.seed, *path)).shuffle(order)
        return order
