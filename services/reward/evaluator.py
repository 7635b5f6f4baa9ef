"""One batch from encoded samples to outcomes: decode, score, check.

Runs in the batcher's worker thread, or in a process of the pool.

Media that cannot be decoded, a score that is not finite and a sample on which the scorer raises become that
sample's `Problem`; the rest of the batch is scored. A batch is taken in parts: while the scorer is at one, the next is
decoded. That a part has at most `MAX_DECODED_PIXELS` bounds memory.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from flowfleet.errors import Unavailable
from flowfleet.reward_requests import EncodedSample
from services.reward.decoding import MAX_PIXELS, Opened, decode, open_sample
from services.reward.groups import bounds, units
from services.reward.scorers.base import Outcome, Params, Problem, Sample, Score, Scorer

MAX_DECODED_PIXELS = 2 * MAX_PIXELS
"""96 MiB as RGB, of which two parts are in memory. A longer video is a part, and in memory, alone."""

PART = 4
"""Units of a part; a scorer that gains from large ones (`call_bytes` 0) takes a batch in two, of no fewer."""

FAILED, DIED = "scorer_failed", "scorer_died"
"""Reasons of Problems that are the scorer's and not the sample's."""

log = logging.getLogger(__name__)


class Evaluator(Generic[Params]):
    """Scores batches with one scorer in this process, one call at a time. `num_threads` threads decode what comes next;
    without any, each part is decoded before it is scored."""

    num_batches = 1

    def __init__(self, scorer: Scorer[Params], num_threads: int) -> None:
        scorer.start()
        self._scorer = scorer
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode") if num_threads else None

    def __call__(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """One outcome a sample, in order."""
        opened = [open_sample(sample, self._scorer.modalities) for sample in samples]
        batch = [opened[start:end] for start, end in bounds(units(samples, self._scorer.needs_group))]
        outcomes: list[Outcome] = []
        decoding: deque[Iterator[Sample | Problem]] = deque()
        for part in _parts(batch, self._part_size(len(batch))):
            is_large = _num_pixels(part) > MAX_DECODED_PIXELS
            if decoding and is_large:
                outcomes += self._score_part(list(decoding.popleft()), params)
            decoding.append(self._decode(part))
            if is_large or len(decoding) > 1:
                outcomes += self._score_part(list(decoding.popleft()), params)
        return outcomes + [outcome for part in decoding for outcome in self._score_part(list(part), params)]

    def close(self) -> None:
        if self._decoders:
            self._decoders.shutdown()

    def _part_size(self, num_units: int) -> int:
        if self._decoders is None:
            return num_units
        return PART if self._scorer.call_bytes else max(PART, math.ceil(num_units / 2))

    def _decode(self, part: Sequence[Opened | Problem]) -> Iterator[Sample | Problem]:
        """Begins at once, if there are threads for it."""
        each = self._decoders.map if self._decoders else map
        return each(lambda item: decode(item) if isinstance(item, Opened) else item, part)

    def _score_part(self, decoded: Sequence[Sample | Problem], params: Params) -> list[Outcome]:
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


def _parts(batch: Sequence[Sequence[Opened | Problem]], size: int) -> Iterator[list[Opened | Problem]]:
    """Runs of units, in order, at most so many and with at most MAX_DECODED_PIXELS together; a larger unit stands
    alone. As equal as they can be: the OCR reader reads a picture that is alone twice over."""
    part: list[Opened | Problem] = []
    count, budget = 0, MAX_DECODED_PIXELS
    size = math.ceil(len(batch) / math.ceil(len(batch) / size))
    for unit in batch:
        cost = _num_pixels(unit)
        if count == size or (part and cost > budget):
            yield part
            part, count, budget = [], 0, MAX_DECODED_PIXELS
        part += unit
        count += 1
        budget -= cost
    if part:
        yield part


def _num_pixels(part: Sequence[Opened | Problem]) -> int:
    return sum(item.num_pixels for item in part if isinstance(item, Opened))
