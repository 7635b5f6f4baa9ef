"""Plan of a step: which rank trains on which samples in which forward. Pure, and the same on every rank.

A step has passes through its samples, a pass has updates (one optimizer step each), an update has micro-batches (one
forward and backward each). Every rank runs the same number of them, because each may have collectives. A rank with too
few repeats samples that are trained elsewhere; such a `MicroBatch` is padding and weighs nothing.

A rank keeps its samples in all passes, which deal them to other updates: values that it computed for them stay valid.

The two samples of a pair stay together in one micro-batch, the winner first. So do all samples of a group, for losses
that compare them.

Deterministic, for losses that recompute the rollout's log-probs: a micro-batch holds the rows of one Generate call
(whole groups up to `rollout.batch_size` rows, by group number), cut at `micro_batch_size` rows. With both sizes equal
its forward repeats the rollout's bit for bit. So it is where lines of data have sizes, since these calls have one each.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from math import ceil
from typing import TypeVar

from flowfleet.job.spec import JobSpec
from flowfleet.seeds import derive_seed

T = TypeVar("T")

Key = tuple[int, int]
"""Group and index of a sample."""
Pair = tuple[int, int]
"""The winner's and the loser's index into the step's samples."""
Unit = tuple[int, ...]
"""Samples that no batch may part: one, a pair, or a group."""


@dataclass(frozen=True)
class MicroBatch:
    rows: tuple[int, ...]
    """Indices into the step's samples."""
    is_padding: bool = False


@dataclass(frozen=True)
class Update:
    num_samples: int
    """Over all ranks, without padding."""
    by_rank: tuple[tuple[MicroBatch, ...], ...]
    """The same number of micro-batches for every rank."""


def plan_step(
    keys: Sequence[Key], spec: JobSpec, step: int, world_size: int, *, pairs: Sequence[Pair] = ()
) -> tuple[Update, ...]:
    """Splits samples, given by their keys in any order, into `trainer.updates_per_step` updates (fewer if too few).

    `pairs`, for losses that need them, holds every sample once.
    """
    units = _units(keys, spec, pairs)
    if _keeps_batches(spec):
        parts = _shuffled(_rollout_batches(units, keys, spec), spec, step)
        return tuple(_dealt(share, world_size) for share in split(parts, _num_updates(parts, spec)))
    size = max(1, spec.trainer.micro_batch_size // max(map(len, units)))
    shares = split(_shuffled(units, spec, step), _num_updates(units, spec))
    return tuple(_divided(sorted(share, key=lambda unit: keys[unit[0]]), size, world_size) for share in shares)


def plan_passes(
    keys: Sequence[Key], spec: JobSpec, step: int, world_size: int, *, pairs: Sequence[Pair] = ()
) -> tuple[tuple[Update, ...], ...]:
    """The updates of each of `trainer.passes`. The first is `plan_step`'s; a later one has as many samples of each rank
    in each update, drawn again from the rank's."""
    first = plan_step(keys, spec, step, world_size, pairs=pairs)
    later = range(1, spec.trainer.passes)
    unit_of = {row: unit for unit in _units(keys, spec, pairs) for row in unit} if later else {}
    return (first, *(_redealt(first, keys, spec, (step, number), unit_of) for number in later))


def split(items: Sequence[T], num_parts: int) -> list[list[T]]:
    """Consecutive parts whose lengths differ by one at most; empty ones where there are too few items."""
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(bounds)]


def _units(keys: Sequence[Key], spec: JobSpec, pairs: Sequence[Pair]) -> list[Unit]:
    """In the order of their first sample's key."""
    if pairs:
        return sorted(pairs, key=lambda pair: keys[pair[0]])
    order = sorted(range(len(keys)), key=lambda row: keys[row])
    if spec.loss.needs_groups:
        return [tuple(group) for _, group in groupby(order, key=lambda row: keys[row][0])]
    return [(row,) for row in order]


def _keeps_batches(spec: JobSpec) -> bool:
    return bool(spec.data.size_column) or (spec.trainer.deterministic and spec.records_steps)


def _num_updates(items: Sequence[object], spec: JobSpec) -> int:
    return min(spec.trainer.updates_per_step, len(items))


def _rollout_batches(units: Sequence[Unit], keys: Sequence[Key], spec: JobSpec) -> list[Unit]:
    size = max(1, spec.trainer.micro_batch_size // max(map(len, units)))
    parts: list[Unit] = []
    for _, batch in groupby(units, key=lambda unit: keys[unit[0]][0] // spec.groups_per_request):
        whole = list(batch)
        parts += [tuple(chain(*whole[start : start + size])) for start in range(0, len(whole), size)]
    return parts


def _shuffled(items: list[T], spec: JobSpec, step: int) -> list[T]:
    """Shuffles the rows. With one update per step their order does not matter and stays."""
    if spec.trainer.updates_per_step == 1:
        return items
    return random.Random(derive_seed(spec.seed, "updates", step)).sample(items, len(items))


def _redealt(
    updates: Sequence[Update], keys: Sequence[Key], spec: JobSpec, path: tuple[int, int], unit_of: Mapping[int, Unit]
) -> tuple[Update, ...]:
    """The same numbers of each rank's units in each update. `path`: step and pass."""
    keeps_batches = _keeps_batches(spec)
    by_rank: list[list[tuple[MicroBatch, ...]]] = []
    for rank in range(len(updates[0].by_rank)):
        before = [update.by_rank[rank] for update in updates]
        dealt = [[batch for batch in batches if not batch.is_padding] for batches in before]
        units: list[list[Unit]] = [[batch.rows for batch in batches] for batches in dealt]
        if not keeps_batches:
            units = [list(dict.fromkeys(unit_of[row] for row in chain(*rows))) for rows in units]
        pool = list(chain(*units))
        random.Random(derive_seed(spec.seed, "passes", *path, rank)).shuffle(pool)
        after = []
        for batches, update_units in zip(before, units, strict=True):
            share, pool = sorted(pool[: len(update_units)], key=lambda unit: keys[unit[0]]), pool[len(update_units) :]
            parts = share if keeps_batches else [tuple(chain(*part)) for part in split(share, len(batches)) if part]
            after.append(_padded([MicroBatch(part) for part in parts], len(batches), batches[0].rows))
        by_rank.append(after)
    dealt_again = list(zip(*by_rank, strict=True))
    counts = [sum(len(batch.rows) for batch in chain(*ranks) if not batch.is_padding) for ranks in dealt_again]
    return tuple(map(Update, counts, dealt_again))


def _dealt(parts: Sequence[Unit], world_size: int) -> Update:
    """Whole micro-batches, dealt to the ranks in turn."""
    num_each = ceil(len(parts) / world_size)
    by_rank = [[MicroBatch(part) for part in parts[rank::world_size]] for rank in range(world_size)]
    return Update(sum(map(len, parts)), tuple(_padded(batches, num_each, parts[0]) for batches in by_rank))


def _divided(units: Sequence[Unit], size: int, world_size: int) -> Update:
    """Equal shares, each cut into the same number of micro-batches of at most `size` units."""
    num_each = ceil(ceil(len(units) / world_size) / size)
    shares = [
        [MicroBatch(tuple(chain(*part))) for part in split(share, num_each) if part]
        for share in split(units, world_size)
    ]
    return Update(sum(map(len, units)), tuple(_padded(batches, num_each, units[0]) for batches in shares))


def _padded(batches: list[MicroBatch], length: int, spare: Unit) -> tuple[MicroBatch, ...]:
    """`spare` stands in where a rank has none of its own."""
    rows = batches[-1].rows if batches else spare
    return (*batches, *[MicroBatch(rows, is_padding=True)] * (length - len(batches)))
