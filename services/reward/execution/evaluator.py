"""Turns a batch of encoded samples into outcomes: decodes, scores, checks.

Runs in the batcher's worker thread, or in a process of the pool.

Media that cannot be decoded, a score that is not finite and a sample on which the scorer raises become that sample's
`Problem`; the rest of the batch is scored. A batch is cut into parts: while one is scored, the next is decoded. A part
has at most `MAX_DECODED_PIXELS`, which bounds memory.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from flowfleet.errors import Unavailable
from flowfleet.process.pulse import Pulse
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.decoding import MAX_PIXELS, Opened, decode, open_sample
from services.reward.execution.groups import bounds, units
from services.reward.scorer import GradientOutcome, Outcome, Params, Problem, Sample, Score, ScoreGradient, Scorer

MAX_DECODED_PIXELS = 2 * MAX_PIXELS
"""96 MiB as RGB, of which two parts are in memory: what is scored, and what is decoded ahead. A longer video is a part,
and alone in memory; in a pool's process, with what is decoded ahead."""

PART = 4
"""Units of a part; a scorer that gains from large ones (`call_bytes` 0) takes a batch in two, of no fewer."""

FAILED, DIED = "scorer_failed", "scorer_died"
"""Reasons of Problems that are the scorer's and not the sample's."""

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Part:
    """Samples of a batch that are decoded, then scored, together. Emptied when decoding begins."""

    items: list[Opened | Problem] = field(default_factory=list)
    num_pixels: int = 0
    decoded: list[Sample | Problem] | None = None
    """Replaces the items of a part that was decoded ahead."""

    @property
    def is_large(self) -> bool:
        return self.num_pixels > MAX_DECODED_PIXELS


class Evaluator(Generic[Params]):
    """Scores batches with one scorer in this process, one at a time. `num_threads` threads decode what comes next;
    without any, each part is decoded before it is scored."""

    num_batches = 1

    def __init__(self, scorer: Scorer[Params], num_threads: int, pulse: Pulse | None = None) -> None:
        scorer.start()
        self.pulse = pulse or Pulse()
        self.scorer = scorer
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode") if num_threads else None

    def __call__(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order."""
        with self.pulse.work("score", len(samples)):
            return self.finish(self._cut(samples), params)

    def begin(self, samples: Sequence[EncodedSample], max_pixels: int) -> list[Part]:
        """Begins a batch for `finish`, with the first part decoded if it has no more pixels. Several threads may call
        it at once."""
        parts = self._cut(samples)
        for part in parts[:1]:
            if part.num_pixels <= max_pixels:
                part.decoded = list(map(_decode, part.items))
                part.items.clear()
        return parts

    def finish(self, parts: Sequence[Part], params: Params) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order."""
        outcomes: list[Outcome] = []
        decoding: deque[Iterator[Sample | Problem]] = deque()
        for part in parts:
            if decoding and part.is_large:
                outcomes += self._score_part(list(decoding.popleft()), params)
            decoding.append(self._decode(part))
            if part.is_large or len(decoding) > 1:
                outcomes += self._score_part(list(decoding.popleft()), params)
        return outcomes + [outcome for part in decoding for outcome in self._score_part(list(part), params)]

    def close(self) -> None:
        if self._decoders:
            self._decoders.shutdown()

    def _cut(self, samples: Sequence[EncodedSample]) -> list[Part]:
        opened = [open_sample(sample, self.scorer.modalities, self.scorer.sound_rate) for sample in samples]
        batch = [opened[start:end] for start, end in bounds(units(samples, self.scorer.needs_group))]
        return list(_parts(batch, self._part_size(len(batch))))

    def _part_size(self, num_units: int) -> int:
        if self._decoders is None:
            return num_units
        return PART if self.scorer.call_bytes else max(PART, math.ceil(num_units / 2))

    def _decode(self, part: Part) -> Iterator[Sample | Problem]:
        """Takes what is in the part. Begins at once, if there are threads for it."""
        items, part.items = part.items, []
        decoded, part.decoded = part.decoded, None
        return iter(decoded) if decoded is not None else (self._decoders.map if self._decoders else map)(_decode, items)

    def _score_part(self, decoded: Sequence[Sample | Problem], params: Params) -> list[Outcome]:
        outcomes = iter(self._score([item for item in decoded if isinstance(item, Sample)], params))
        self.pulse.beat()
        return [next(outcomes) if isinstance(item, Sample) else item for item in decoded]

    def _score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        if not samples:
            return []
        parts = units(samples, self.scorer.needs_group)
        name, score = self.scorer.name, lambda some: self.scorer.score(some, params)
        return guarded(name, "samples", parts, score, _finished, self.pulse.beat)


def guarded(
    name: str,
    what: str,
    units: Sequence[Sequence[Item]],
    score: Callable[[Sequence[Item]], list[Result]],
    check: Callable[[Item, Result], Result],
    beat: Callable[[], None],
) -> list[Result | Problem]:
    """Scores all units at once, and checks each outcome. Where that raises they are scored one by one, and those that
    raise again have problems. `beat` is called after each."""

    def checked(some: Sequence[Item]) -> list[Result]:
        outcomes = score(some)
        if len(outcomes) != len(some):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(some)} samples")
        return [check(*pair) for pair in zip(some, outcomes, strict=True)]

    samples = [sample for unit in units for sample in unit]
    try:
        return [*checked(samples)]
    except Exception:
        log.exception("scorer %s failed on %d %s; scoring one by one", name, len(samples), what)
    outcomes: list[Result | Problem] = []
    for unit in units:
        try:
            outcomes += checked(unit)
        except Exception as error:
            text = f"scorer {name} raised {type(error).__name__}"
            outcomes += [Problem(FAILED, text)] * len(unit)
        beat()
    return outcomes


def unless_all_failed(name: str, outcomes: Sequence[Outcome | GradientOutcome]) -> None:
    """Raises Unavailable where the scorer failed on several samples of a batch and scored none: it is broken."""
    failed = sum(isinstance(outcome, Problem) and outcome.reason in (FAILED, DIED) for outcome in outcomes)
    if failed > 1 and not any(isinstance(outcome, Score | ScoreGradient) for outcome in outcomes):
        first = next(one.message for one in outcomes if isinstance(one, Problem) and one.reason in (FAILED, DIED))
        raise Unavailable(f"{first} on all {failed} samples; the log of scorer {name} has more")


def finite(outcome: Outcome) -> Outcome:
    """The outcome itself, or a Problem in place of a score or component that is NaN or infinite."""
    if not isinstance(outcome, Score):
        return outcome
    named = {"the score": outcome.value, **{f"component {name}": value for name, value in outcome.components.items()}}
    broken = [f"{name} is {value}" for name, value in named.items() if not math.isfinite(value)]
    return Problem("non_finite", "; ".join(broken)) if broken else outcome


def _finished(sample: Sample, outcome: Outcome) -> Outcome:
    """The finite outcome with the size of the file that it is of, by which the controller sees scores that were
    exchanged."""
    outcome = finite(outcome)
    return replace(outcome, media_size=sample.media_size) if isinstance(outcome, Score) else outcome


def _parts(batch: Sequence[Sequence[Opened | Problem]], size: int) -> Iterator[Part]:
    """Runs of units, in order, at most so many and with at most MAX_DECODED_PIXELS together; a larger unit stands
    alone. As equal as they can be: the OCR reader reads a picture that is alone twice over."""
    part, count = Part(), 0
    size = math.ceil(len(batch) / math.ceil(len(batch) / size))
    for unit in batch:
        num_pixels = sum(item.num_pixels for item in unit if isinstance(item, Opened))
        if count == size or (count and part.num_pixels + num_pixels > MAX_DECODED_PIXELS):
            yield part
            part, count = Part(), 0
        part.items += unit
        part.num_pixels += num_pixels
        count += 1
    if count:
        yield part


def _decode(item: Opened | Problem) -> Sample | Problem:
    return decode(item) if isinstance(item, Opened) else item
