"""One batch from encoded samples to outcomes: decode, score, check.

Runs in the batcher's worker thread, or in a process of the pool.

Media that cannot be decoded, a score that is not finite and a sample on which the scorer raises become that
sample's `Problem`; the rest of the batch is scored. Decoding at most `MAX_DECODED_PIXELS` at a time bounds memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from flowfleet.errors import Unavailable
from flowfleet.reward_requests import EncodedSample
from services.reward.decoding import MAX_PIXELS, Opened, decode, open_sample
from services.reward.groups import bounds, units
from services.reward.scorers.base import Outcome, Params, Problem, Sample, Score, Scorer

MAX_DECODED_PIXELS = 4 * MAX_PIXELS
"""192 MiB as RGB. A longer video is decoded alone."""

FAILED, DIED = "scorer_failed", "scorer_died"
"""Reasons of Problems that are the scorer's and not the sample's."""

log = logging.getLogger(__name__)


class Evaluator(Generic[Params]):
    """Scores batches with one scorer in this process. Decodes on `num_threads` threads or, where that is 1, on the
    caller's. One call at a time."""

    num_batches = 1

    def __init__(self, scorer: Scorer[Params], num_threads: int) -> None:
        scorer.start()
        self._scorer = scorer
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode") if num_threads > 1 else None

    def __call__(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """One outcome a sample, in order."""
        opened = [open_sample(sample, self._scorer.modalities) for sample in samples]
        batch = [opened[start:end] for start, end in bounds(units(samples, self._scorer.needs_group))]
        return [outcome for part in _parts(batch) for outcome in self._score_part(part, params)]

    def close(self) -> None:
        if self._decoders:
            self._decoders.shutdown()

    def _score_part(self, part: Sequence[Opened | Problem], params: Params) -> list[Outcome]:
        each = self._decoders.map if self._decoders else map
        decoded = list(each(lambda item: decode(item) if isinstance(item, Opened) else item, part))
        outcomes = iter(self._score([item for item in decoded if isinstance(item, Sample)], params))
        return [next(outcomes) if isinstance(item, Sample) else item for item in decoded]

    def _score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        if not samples:
            return []
        try:
            return self._checked(samples, params)
        except Exception:
            log.exception("scorer %s failed on %d samples; scoring one by one", self._scorer.name, len(samples))
        return [
            outcome for unit in units(samples, self._scorer.needs_group) for outcome in self._score_alone(unit, params)
        ]

    def _score_alone(self, unit: Sequence[Sample], params: Params) -> list[Outcome]:
        try:
            return self._checked(unit, params)
        except Exception as error:
            text = f"scorer {self._scorer.name} failed on this sample: {type(error).__name__}"
            return [Problem(FAILED, text)] * len(unit)

    def _checked(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        outcomes = self._scorer.score(samples, params)
        if len(outcomes) != len(samples):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(samples)} samples")
        return [finite(outcome) for outcome in outcomes]


def unless_all_failed(name: str, outcomes: Sequence[Outcome]) -> None:
    """Raises Unavailable where the scorer failed on several samples of a batch and scored none: it is broken."""
    failed = sum(isinstance(outcome, Problem) and outcome.reason in (FAILED, DIED) for outcome in outcomes)
    if failed > 1 and not any(isinstance(outcome, Score) for outcome in outcomes):
        first = next(one.message for one in outcomes if isinstance(one, Problem) and one.reason in (FAILED, DIED))
        raise Unavailable(f"scorer {name} failed on all {failed} samples; its log has the reason. The first: {first}")


def finite(outcome: Outcome) -> Outcome:
    """The outcome itself, or a Problem in place of a score or component that is NaN or infinite."""
    if isinstance(outcome, Problem):
        return outcome
    named = {"the score": outcome.value, **{f"component {name}": value for name, value in outcome.components.items()}}
    broken = [f"{name} is {value}" for name, value in named.items() if not math.isfinite(value)]
    return Problem("non_finite", "; ".join(broken)) if broken else outcome


def _parts(batch: Iterable[Sequence[Opened | Problem]]) -> Iterator[list[Opened | Problem]]:
    """Runs of units with at most MAX_DECODED_PIXELS together, in order; a larger unit stands alone."""
    part: list[Opened | Problem] = []
    budget = MAX_DECODED_PIXELS
    for unit in batch:
        cost = sum(item.num_pixels for item in unit if isinstance(item, Opened))
        if part and cost > budget:
            yield part
            part, budget = [], MAX_DECODED_PIXELS
        part += unit
        budget -= cost
    if part:
        yield part
